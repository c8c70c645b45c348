"""What the orchestrator's process uses of the model layer must not load torch: seconds and hundreds of megabytes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import sys
from flexmarl.core.protocols import ChatMessage
from flexmarl.models import ScriptedTokenizer, context_length, load_tokenizer, resolve_model_folder
assert "tokenizers" not in sys.modules
folder = resolve_model_folder("shipped:chain_sum")
context_length(folder)
tokenizer = load_tokenizer(folder)
message = ChatMessage(role="user", content="x")
tokenizer.decode(tokenizer.render([message]) + tokenizer.render_continuation([message], is_stopped=True))
print(sorted({"torch", "transformers", "numpy"} & sys.modules.keys()))
"""


def test_folders_and_tokenizers_need_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("[]", "")
