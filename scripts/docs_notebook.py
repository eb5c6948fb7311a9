"""A hook of mkdocs: each notebook of docs becomes a page, with the outputs that it holds.

Nothing is executed. Of each output the richest form that needs no script is shown: a picture, else
HTML, else text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages to the site."""
    for path in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        note = f"[The notebook itself]({path.name}), to run and change.\n\n"
        name = path.relative_to(config.docs_dir).with_suffix(".md").as_posix()
        files.append(File.generated(config, name, content=page(json.loads(text), note)))
    return files


def page(notebook: dict[str, Any], note: str) -> str:
    """A notebook as Markdown; the note stands behind its first cell."""
    parts = [part for cell in notebook["cells"] for part in _cell(cell)]
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    outputs = [_output(output) for output in cell["outputs"]]
    return [f"```python\n{source}\n```", *outputs]


def _output(output: dict[str, Any]) -> str:
    forms = {"text/plain": output["text"]} if "text" in output else output["data"]
    if "image/png" in forms:
        encoded = "".join(forms["image/png"]).replace("\n", "")
        return _shown(f'<img alt="{_title(forms)}" src="data:image/png;base64,{encoded}">')
    if "text/html" in forms:
        return _shown("".join(forms["text/html"]))
    return f"```text\n{''.join(forms['text/plain']).rstrip()}\n```"


def _title(forms: dict[str, Any]) -> str:
    """What a figure says of itself, for those who do not see it."""
    layout = forms.get("application/vnd.plotly.v1+json", {}).get("layout", {})
    heading = layout.get("meta", {}).get("heading", ["a picture"])
    return "; ".join(heading).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _shown(html: str) -> str:
    lines = "\n".join(line for line in html.splitlines() if line.strip())
    return f'<div class="tour-output">\n{lines}\n</div>'
