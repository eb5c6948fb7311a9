"""Loading a model: from the hub or its cache, from a folder, or the shipped demo model.

The only file that imports TransformerLens. Weights come unprocessed unless asked, because every
analysis here is right in any processing state and an ablation means something else once biases
were folded.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from resid_patching.errors import (
    BackendWarning,
    HubUnreachableError,
    ModelNotFoundError,
    NotFiniteError,
    UnsupportedModelError,
    warn,
)
from resid_patching.models.guards import require_finite
from resid_patching.models.view import ModelView, note_revision

Processing = Literal["raw", "folded"]
Backend = Literal["auto", "hooked", "bridge"]

DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"
_HUB_SECONDS = 3.0
_COMPARED_TOKENS = 8
_LOW = {torch.bfloat16: 0.1, torch.float16: 0.03}
"""How far log-probabilities may be apart on average, in their standard deviations."""
_log = logging.getLogger(__name__)


def load(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    processing: Processing = "raw",
    backend: Backend = "auto",
) -> Any:
    """Loads a model with its tokenizer, in eval mode.

    What it predicts on a few random tokens is compared with what the Hugging Face model predicts
    that it was made of, taken before TransformerLens changed that one.

    Args:
        name_or_path: a hub name (`gpt2`), a local Hugging Face folder, or `demo`, the model that
            is shipped with the package.
        device: where the model goes.
        dtype: the dtype of its weights.
        processing: `raw` leaves the weights as they are; `folded` applies TransformerLens's
            defaults (norms folded, writing weights and unembedding centred, value biases folded).
        backend: `hooked` for HookedTransformer (TransformerLens 3), `bridge` for
            TransformerBridge, `auto` for the first where it is installed and can build this
            architecture and else the second. Every result's provenance says which it was.

    Returns:
        A HookedTransformer or a TransformerBridge.

    Raises:
        ModelNotFoundError: no such folder or name.
        HubUnreachableError: not in the cache, and the hub does not answer within seconds.
        UnsupportedModelError: the backend asked for cannot build this model or builds one that
            predicts otherwise than Hugging Face's, or its files lack some of its weights.
        NotFiniteError: its weights, or its logits, are NaN or infinite.
    """
    _require_choice("processing", processing, ("raw", "folded"))
    _require_choice("backend", backend, ("auto", "hooked", "bridge"))
    if backend == "hooked" and _hooked_transformer() is None:
        raise UnsupportedModelError(
            "backend='hooked' was asked for, but this TransformerLens has no HookedTransformer "
            "(it left in version 4). Use backend='bridge', or install 'transformer-lens<4'."
        )
    path = _local_folder(name_or_path)
    folder_or_name = str(name_or_path) if path is None else str(path)
    hub_name = None if path is not None else folder_or_name
    # Loaders draw weights before they read them; the caller's random numbers stay as they are.
    with _quiet(), _hub_state(hub_name), torch.random.fork_rng(devices=[]):
        model = _build(folder_or_name, path is not None, device, dtype, processing, backend)
    if hub_name is not None and (config := _cached_config(hub_name)) is not None:
        note_revision(model, config.parent.name)  # snapshots/<commit>/config.json
    return model


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(choices)}; got {value!r}")


def _local_folder(name_or_path: str | os.PathLike[str]) -> Path | None:
    """The folder that is meant, or None for a hub name."""
    text = os.fspath(name_or_path)
    if text == "demo":
        return DEMO_FOLDER
    absent = ModelNotFoundError(
        f"there is no model folder {text!r}. Give a Hugging Face folder (with config.json), "
        "a hub name such as gpt2, or demo."
    )
    if not text.strip():
        raise absent
    path = Path(text).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    if path.is_dir():
        raise ModelNotFoundError(
            f"{text} is a folder without config.json; a Hugging Face model folder is needed"
        )
    if path.exists():
        raise ModelNotFoundError(f"{text} is a file; a Hugging Face model folder is needed")
    if isinstance(name_or_path, os.PathLike) or not _is_hub_name(text):
        raise absent
    return None


def _is_hub_name(text: str) -> bool:
    """Whether a model of the hub can have this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _build(
    source: str,
    is_folder: bool,
    device: str | torch.device,
    dtype: torch.dtype,
    processing: Processing,
    backend: Backend,
) -> Any:
    problem = None
    if backend != "bridge" and (hooked := _hooked_transformer()) is not None:
        is_alias = not is_folder and _is_alias(source)
        build = _hooked_from_hub if is_alias else _hooked_from_hugging_face
        try:
            with _original_of(source) as original:
                model = build(hooked, source, device, dtype, processing)
            return _examined(model, original)
        except (HubUnreachableError, ModelNotFoundError, NotFiniteError, _IncompleteError):
            raise
        except Exception as error:
            if backend == "hooked":
                raise UnsupportedModelError(
                    f"HookedTransformer cannot build {source}: {_one_line(error)}. "
                    "Use backend='bridge'."
                ) from error
            problem = _one_line(error)
    with _original_of(source, device) as original:
        model = _bridge(source, device, dtype, processing)
    _examined(model, original)
    if problem is not None:
        warn(
            f"HookedTransformer cannot build {source} ({problem}); loaded as a TransformerBridge",
            BackendWarning,
        )
    return model


def _hooked_transformer() -> Any | None:
    """The class HookedTransformer, or None from TransformerLens 4 on, which has none."""
    try:
        from transformer_lens import HookedTransformer  # type: ignore[attr-defined]
    except ImportError:
        return None
    return HookedTransformer


def _is_alias(name: str) -> bool:
    """Whether TransformerLens 3 knows this hub name for HookedTransformer."""
    from transformer_lens import loading_from_pretrained as loading  # type: ignore[attr-defined]

    try:
        loading.get_official_model_name(name)
    except ValueError:
        return False
    return True


def _fold_options(processing: Processing) -> dict[str, bool]:
    folded = processing == "folded"
    names = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    return dict.fromkeys(names, folded)


def _hooked_from_hub(
    hooked: Any, name: str, device: Any, dtype: torch.dtype, processing: Processing
) -> Any:
    return hooked.from_pretrained(
        name, device=str(device), dtype=dtype, **_fold_options(processing)
    )


def _hooked_from_hugging_face(
    hooked: Any, source: str, device: Any, dtype: torch.dtype, processing: Processing
) -> Any:
    """Builds a HookedTransformer from a folder: its own loader accepts hub names alone."""
    from transformer_lens import loading_from_pretrained as loading  # type: ignore[attr-defined]

    original = _hugging_face_model(source, dtype)
    with _neutral_folder(original.config) as neutral:
        options = _fold_options(processing)
        cfg = loading.get_pretrained_model_config(
            neutral,
            hf_cfg=original.config.to_dict(),
            fold_ln=options["fold_ln"],
            device=str(device),
            dtype=dtype,
        )
        cfg.model_name = _display_name(source)
        cfg.tokenizer_name = None
        state = loading.get_pretrained_state_dict(neutral, cfg, original, dtype=dtype)
    state = {key: value.detach().clone() for key, value in state.items()}
    del original  # its memory is wanted for the model
    model = hooked(cfg, _tokenizer(source), move_to_device=False)
    if _is_capped(cfg):
        options["center_unembed"] = False
    model.load_and_process_state_dict(state, **options)
    model.to(device)
    return model


def _is_capped(cfg: Any) -> bool:
    cap = getattr(cfg, "output_logits_soft_cap", None)
    return cap is not None and cap > 0


@contextlib.contextmanager
def _neutral_folder(config: Any) -> Iterator[str]:
    """A folder with this config alone, under a name that says nothing.

    TransformerLens 3 guesses the architecture from words in the path before it reads the config.
    """
    root = "/" if os.name == "posix" else None
    for parent in (tempfile.gettempdir(), root):
        words = ("llama", "gemma", "bert", "hubert", "wav2vec2", "t5")
        if parent and not any(word in parent.lower() for word in words):
            break
    with tempfile.TemporaryDirectory(prefix="model-", dir=parent) as folder:
        facts = config.to_dict()
        # The converter for GPT-2 reads n_ctx, which configs written lately spell n_positions.
        facts.setdefault("n_ctx", facts.get("n_positions", facts.get("max_position_embeddings")))
        text = json.dumps(facts, default=str)
        Path(folder, "config.json").write_text(text, encoding="utf-8")
        yield folder


def _bridge(source: str, device: Any, dtype: torch.dtype, processing: Processing) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = _tokenizer(source)
    if tokenizer is None:
        model = _bridge_without_tokenizer(source, device, dtype)
    else:
        try:
            model = TransformerBridge.boot_transformers(
                source, device=str(device), dtype=dtype, tokenizer=tokenizer
            )
        except (HubUnreachableError, ModelNotFoundError, UnsupportedModelError):
            raise
        except Exception as error:
            raise _load_failure(source, error) from error
    model.cfg.model_name = _display_name(source)
    if processing == "folded":
        model.enable_compatibility_mode(disable_warnings=True)
    return model


def _bridge_without_tokenizer(source: str, device: Any, dtype: torch.dtype) -> Any:
    """Loads a bridge from a folder without a tokenizer, where its own loader would invent one."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    original = _hugging_face_model(source, dtype).to(device)
    try:
        return build_bridge_from_module(
            original,
            type(original).__name__,
            hf_config=original.config,
            dtype=dtype,
            device=device,
        )
    except Exception as error:
        raise _load_failure(source, error) from error


def _hugging_face_model(source: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _load_failure(source, error) from error


def _load_failure(source: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and "config.json" in str(error):
        return ModelNotFoundError(f"there is no model {source}: {_one_line(error)}")
    return UnsupportedModelError(f"{source} cannot be loaded: {_one_line(error)}")


def _tokenizer(source: str) -> Any | None:
    """The model's tokenizer, or None where its folder holds none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    if Path(source).is_dir() and not any(Path(source, name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise UnsupportedModelError(
            f"the tokenizer of {source} cannot be loaded: {_one_line(error)}"
        ) from error


def _display_name(source: str) -> str:
    if Path(source) == DEMO_FOLDER:
        return "demo"
    return Path(source).name if Path(source).is_dir() else source


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the loaders' progress prints and deprecation notes out of the caller's output."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


class _IncompleteError(UnsupportedModelError):
    """A checkpoint without some of the model's weights."""


@dataclass
class _Original:
    """The Hugging Face model that a model is made of: what it predicts on a few tokens.

    Attributes:
        source: its folder or name.
        device: where it is moved before it predicts; None to leave it where it is.
        tokens: [1, pos], random; None where no Hugging Face model was loaded.
        log_probs: [1, pos, d_vocab].
    """

    source: str
    device: str | torch.device | None
    tokens: Tensor | None = None
    log_probs: Tensor | None = None

    def record(self, model: Any) -> None:
        """Runs a Hugging Face model that was just loaded, if its weights are finite."""
        require_finite(model, self.source)
        if self.device is not None:
            model.to(self.device)
        facts = model.config.get_text_config()
        length = min(_COMPARED_TOKENS, getattr(facts, "max_position_embeddings", None) or 8)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(
            facts.vocab_size, (1, length), generator=generator, device="cpu"
        ).to(model.device)
        try:
            with torch.no_grad():
                self.log_probs = model(self.tokens).logits.float().log_softmax(-1)
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.source} is no language model that reads ids alone "
                f"({type(model).__name__}: {_one_line(error)})"
            ) from error


@contextlib.contextmanager
def _original_of(source: str, device: str | torch.device | None = None) -> Iterator[_Original]:
    """Watches TransformerLens load the Hugging Face model that it makes its own of.

    A checkpoint that lacks weights is refused: transformers draws at random what it does not
    find. And what the model predicts is recorded before TransformerLens has it: bridging replaces
    its blocks, folding rewrites its weights.
    """
    from transformers import PreTrainedModel

    original = _Original(source, device)
    plain = PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        wants_info = options.pop("output_loading_info", False)
        model, info = plain.__func__(cls, *args, output_loading_info=True, **options)
        if missing := sorted(info["missing_keys"]):
            raise _IncompleteError(
                f"the files of {args[0]} lack {len(missing)} of the weights that its config.json "
                f"asks for ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); they "
                "would be random numbers. Download or save the model again."
            )
        original.record(model)
        return (model, info) if wants_info else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
    try:
        yield original
    finally:
        PreTrainedModel.from_pretrained = plain


def _examined(model: Any, original: _Original) -> Any:
    """The model in eval mode, where its weights are finite and it predicts as the original does.

    Log-probabilities are compared: a centred unembedding moves the logits by a constant.
    """
    model.eval()
    if original.tokens is None or original.log_probs is None:
        require_finite(model, original.source)
        return model
    view, expected = ModelView(model), original.log_probs
    dtype = str(view.dtype).removeprefix("torch.")
    if not bool(expected.isfinite().all()):
        raise NotFiniteError(
            f"the logits of {original.source} are NaN or infinite in {dtype}. Load it in float32 "
            "or bfloat16."
        )
    found = view.forward(original.tokens.to(view.input_device), {}).float().log_softmax(-1)
    apart = (found.to(expected.device) - expected).abs()
    if view.dtype in _LOW:  # rounding moves single ones far; a wrong model moves them all
        size, error = "on average", float(apart.pow(2).mean().sqrt())
        allowed = _LOW[view.dtype] * float(expected.std())
    else:
        size, error = "up to", float(apart.max())
        allowed = 1e-3 * max(1.0, float(expected.abs().max()) / 10)
    if not error <= allowed:
        require_finite(model, original.source)
        raise UnsupportedModelError(
            f"the {view.kind} that TransformerLens {view.transformer_lens_version} makes of "
            f"{original.source} does not predict what Hugging Face's own model predicts: "
            f"log-probabilities are {size} {error:.2g} apart (tolerance {allowed:.1g}), so its "
            "numbers would be of another model; another version of TransformerLens may build it "
            "right"
        )
    return model


@contextlib.contextmanager
def _hub_state(name: str | None) -> Iterator[None]:
    """Decides once whether the hub is asked: not for a folder, nor where it does not answer.

    Without this, an unreachable hub costs several rounds of retries for each file.
    """
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    if name is None:
        constants.HF_HUB_OFFLINE = True
    elif not before and not _hub_answers(constants.ENDPOINT):
        _log.info("the hub does not answer; using its cache")
        constants.HF_HUB_OFFLINE = True
    if name is not None and constants.HF_HUB_OFFLINE and _cached_config(name) is None:
        constants.HF_HUB_OFFLINE = before
        why = "HF_HUB_OFFLINE is set" if before else "the hub does not answer"
        raise HubUnreachableError(
            f"{name} is neither a folder nor in the local cache, and {why}. Check the connection, "
            "pass the folder of a downloaded model, or use demo, the model shipped with the "
            "package."
        )
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _hub_answers(endpoint: str) -> bool:
    """Whether any HTTP answer comes from the hub within `_HUB_SECONDS`, proxies honoured."""
    import httpx

    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            httpx.head(endpoint, timeout=_HUB_SECONDS, follow_redirects=False)
            answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return bool(answers)


def _cached_config(name: str) -> Path | None:
    """The model's configuration in the local hub cache, under any name it goes by."""
    from huggingface_hub import try_to_load_from_cache

    names = [name]
    if _hooked_transformer() is not None and _is_alias(name):
        from transformer_lens import loading_from_pretrained as loading  # type: ignore

        names.append(loading.get_official_model_name(name))
    paths = (try_to_load_from_cache(n, "config.json") for n in names)
    return next((Path(path) for path in paths if isinstance(path, str)), None)
