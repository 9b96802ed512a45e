"""What vLLM answers without any connector. Run in a process of its own: prompts in (JSON), replies out (last line)."""

import json
import sys
from pathlib import Path

from engine import ask, start

order = json.loads(sys.stdin.read())
llm = start(Path(order["model"]))
replies = [ask(llm, prompt)[0] for prompt in order["prompts"]]
print("\n" + json.dumps(replies))
