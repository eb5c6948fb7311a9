"""Hub names: from the local cache without a connection, and a quick answer where there is none."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
import zoo

import resid_patching as rp
from resid_patching.errors import HubUnreachableError

SNAPSHOT = "0123456789abcdef0123456789abcdef01234567"

CHILD = """
import json, sys, time
import transformer_lens
import transformers
import resid_patching as rp

name, backends = sys.argv[1], sys.argv[2:]
found = []
for backend in backends:
    start = time.monotonic()
    try:
        model = rp.load(name, backend=backend)
        dla = rp.direct_logit_attribution(rp.capture(model, "When Mary and John"), " Mary", " John")
        outcome = [type(model).__name__, dla.provenance.revision, dla.values[:, 0, 0].tolist()]
    except rp.ResidPatchingError as error:
        outcome = [type(error).__name__, str(error), isinstance(error, ConnectionError)]
    found.append([time.monotonic() - start, *outcome])
print(json.dumps(found))
"""


def load_in_a_child(home, name, *backends, endpoint="http://127.0.0.1:9"):
    """Load by name in a process of its own, with this hub cache and this hub."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS"))}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, name, *backends],
        env=environment,
        cwd=home,  # where no folder has the model's name
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def hanging_endpoint():
    """A hub that takes every connection and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    connections = []

    def accept():
        while True:
            try:
                connections.append(server.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    server.close()
    for connection in connections:
        connection.close()


def check_unreachable(outcomes):
    for seconds, kind, message, is_connection_error in outcomes:
        assert kind == "HubUnreachableError" and is_connection_error
        assert "neither a folder nor in the local cache" in message
        assert "pass the folder of a downloaded model, or use demo" in message
        assert "\n" not in message
        assert seconds < 5


@pytest.mark.full
def test_a_closed_hub_is_decided_in_five_seconds(tmp_path):
    outcomes = load_in_a_child(tmp_path, "gpt2", *zoo.BACKENDS, "auto")
    check_unreachable(outcomes)
    assert "the hub does not answer" in outcomes[0][2]


@pytest.mark.full
def test_a_hub_that_never_answers_is_decided_in_five_seconds(tmp_path, hanging_endpoint):
    check_unreachable(load_in_a_child(tmp_path, "gpt2", "auto", endpoint=hanging_endpoint))


def test_a_name_that_is_not_cached_is_refused_offline_at_once():
    start = time.monotonic()
    with pytest.raises(HubUnreachableError, match="some-model is neither .* HF_HUB_OFFLINE is set"):
        rp.load("someone/some-model")
    assert time.monotonic() - start < 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A hub cache that holds a small GPT-2 under the names of GPT-2 small."""
    home = tmp_path_factory.mktemp("hub")
    for name in ("gpt2", "openai-community--gpt2"):
        repository = home / "hub" / f"models--{name}"
        shutil.copytree(zoo.text_folder(), repository / "snapshots" / SNAPSHOT)
        config = json.loads((zoo.text_folder() / "config.json").read_text())
        # GPT-2's configuration on the hub spells its context in this older way too.
        config |= {"n_ctx": config["n_positions"], "bos_token_id": 0, "eos_token_id": 0}
        (repository / "snapshots" / SNAPSHOT / "config.json").write_text(json.dumps(config))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(SNAPSHOT)
    return home


@pytest.mark.full
def test_a_cached_model_is_loaded_without_a_hub(cache):
    """On every backend, and it is the model of the cache, with its commit."""
    outcomes = load_in_a_child(cache, "gpt2", *zoo.BACKENDS)
    classes = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}
    for backend, (_, kind, revision, values) in zip(zoo.BACKENDS, outcomes, strict=True):
        assert (kind, revision) == (classes[backend], SNAPSHOT)
        run = rp.capture(zoo.text_model(backend), "When Mary and John")
        expected = rp.direct_logit_attribution(run, " Mary", " John").values[:, 0, 0]
        assert values == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.full
def test_time_is_measured_as_a_caller_would(hanging_endpoint):
    """The twin: this endpoint does hold a plain client up."""
    import httpx

    start = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(hanging_endpoint, timeout=1.5)
    assert time.monotonic() - start > 1.4
