"""Runs a checkpoint folder's own code, alone in its process; `golden.official` starts it.

Requests come as JSON lines on stdin, one answer goes to stdout for each. The first request brings
the bytes of every module that may run: they were read and digested once, so what runs is what was
checked. Used as the official script uses it, and importing nothing of this project.
"""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "BaichuanCharRM"  # as the official script imports it
MAX_TOKENS = 4096
_CODE_SUFFIXES = (".py", ".pyc", ".so", ".pyd")


class CheckpointCode(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the package from memory; `refused` names every other code file that was wanted."""

    def __init__(self, folder: Path, modules: dict[str, bytes]) -> None:
        self.folder = folder  # resolved
        self.modules = modules  # module name -> source
        self.refused: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != PACKAGE:
            return None
        if name and name not in self.modules:
            for other in (f"{name}.py", name):
                if (self.folder / other).exists():
                    self.refuse(other)
            return None  # not there: as for the official script, an ordinary ImportError
        origin = f"<checkpoint>/{name or '__init__'}.py"  # no path: nobody shall read it again
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=origin, is_package=not name)
        spec.has_location = True
        return spec

    def is_package(self, fullname: str) -> bool:
        return fullname == PACKAGE

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source(fullname))

    def get_code(self, fullname: str) -> types.CodeType:
        name = fullname.partition(".")[2] or "__init__"
        return self.source_to_code(self._source(fullname), f"<checkpoint>/{name}.py")

    def _source(self, fullname: str) -> bytes:
        return self.modules.get(fullname.partition(".")[2], b"")

    def refuse(self, name: str) -> None:
        self.refused.append(name)
        raise ImportError(f"{name}: this code of the checkpoint folder was not checked")

    def watch(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse what would run unchecked code of the folder in another way, and the network."""
        if event in ("socket.connect", "socket.getaddrinfo"):
            raise PermissionError("the checkpoint's code runs without a network")
        if event not in ("open", "import", "ctypes.dlopen"):
            return
        path = args[1] if event == "import" else args[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a file descriptor, or nothing
        parent, name = os.path.split(os.fsdecode(path))
        if not name.endswith(_CODE_SUFFIXES):
            return
        inside = Path(os.path.realpath(parent), name)  # a snapshot's files are links to elsewhere
        if inside.is_relative_to(self.folder) and inside.exists():
            self.refuse(str(inside.relative_to(self.folder)))


class Official:
    """The official tokenizer and model, and what the hook on the head saw last."""

    def __init__(self, folder: Path, device: str) -> None:
        tokenization = importlib.import_module(f"{PACKAGE}.tokenization_baichuan")
        modeling = importlib.import_module(f"{PACKAGE}.modeling_baichuan")
        import torch

        self.torch = torch
        self.device = device
        self.tokenizer = tokenization.BaichuanTokenizer.from_pretrained(str(folder))
        model, info = modeling.BaichuanCharRM.from_pretrained(
            str(folder), torch_dtype=torch.bfloat16, output_loading_info=True
        )
        self.missing = sorted(info["missing_keys"])
        random = [name for name in self.missing if name.startswith(("model.", "score."))]
        if random:
            raise ValueError(f"not in the checkpoint, hence random: {', '.join(random)}")
        self.model = model.to(device).eval()
        self.model.score.register_forward_hook(self._on_head, with_kwargs=True)
        self.head: tuple[Any, Any] | None = None

    def describe(self) -> dict[str, Any]:
        torch = self.torch
        cuda = self.device.startswith("cuda")
        return {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": importlib.import_module("transformers").__version__,
            "sentencepiece": importlib.import_module("sentencepiece").__version__,
            "device": torch.cuda.get_device_name(self.device) if cuda else self.device,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "missing_tensors": self.missing,
        }

    def tokenize(self, text: str) -> dict[str, Any]:
        text.encode("utf-8")  # sentencepiece's own error would not say what is wrong
        ids = self.tokenizer.encode(text=text, add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id]
        return {"ids": ids[-MAX_TOKENS:], "dropped": max(0, len(ids) - MAX_TOKENS)}

    def score(self, text: str) -> dict[str, Any]:
        torch, tokens = self.torch, self.tokenize(text)
        self.head = None
        with torch.no_grad():
            p = self.model(input_ids=torch.tensor([tokens["ids"]], device=self.device))[1].item()
        if self.head is None:
            raise RuntimeError("the forward did not call the module `score`")
        hidden, logit = self.head
        return {**tokens, "hidden": hidden, "logit": logit, "p": p, "score": p * 4 + 1}

    def _on_head(self, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the last position, whether the head was given one or all."""
        states = args[0] if args else next(iter(kwargs.values()))
        hidden = states.reshape(-1, states.shape[-1])[-1].contiguous().cpu()
        bits = hidden.view(self.torch.uint8).numpy().tobytes().hex()
        self.head = bits, output.reshape(-1)[-1].item()


def main() -> None:
    """Answer requests until stdin ends."""
    requests = os.fdopen(os.dup(0), "r", encoding="ascii")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    # From here on nothing but an answer reaches the first stdout.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def answer(request: dict[str, Any], content: dict[str, Any]) -> None:
        if code.refused:  # also when the checkpoint's code went on without the module
            content = {"refused": code.refused}
        answers.write(json.dumps({"n": request["n"], **content}) + "\n")
        answers.flush()

    request = json.loads(requests.readline())
    modules = {name: base64.b64decode(source) for name, source in request["modules"].items()}
    code = CheckpointCode(Path(request["folder"]), modules)
    sys.meta_path.insert(0, code)
    sys.addaudithook(code.watch)
    try:
        official = Official(Path(request["folder"]), request["device"])
        about = official.describe()
    except Exception as error:
        traceback.print_exc()
        answer(request, _error("not_started", f"{type(error).__name__}: {error}"))
        return
    answer(request, {"about": about})
    for line in requests:
        request = json.loads(line)
        work = official.score if request["op"] == "score" else official.tokenize
        answer(request, _attempt(work, request["text"]))


def _attempt(work: Callable[[str], dict[str, Any]], text: str) -> dict[str, Any]:
    """Return the result or what went wrong, without the exception's message: it may quote text."""
    try:
        result = work(text)
    except UnicodeEncodeError as error:
        found = f"U+{ord(error.object[error.start]):04X} at character {error.start}"
        return _error("text_not_encodable", f"found the lone surrogate {found} of the input text.")
    except Exception as error:
        traceback.print_exc()
        name, last = type(error).__name__, traceback.extract_tb(error.__traceback__)[-1]
        memory = "MemoryError" in name or "can't allocate memory" in str(error)
        kind = "out_of_memory" if memory else "engine_failed"
        return _error(kind, f"the checkpoint's code: {name} in {last.filename}, {last.lineno}.")
    numbers = [result[name] for name in ("logit", "p") if name in result]
    if not all(math.isfinite(number) for number in numbers):
        return _error("not_finite", f"the model gave the logit and p {numbers}.")
    return result


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


if __name__ == "__main__":
    main()
