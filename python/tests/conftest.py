"""What the tests share."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"

# The tensors here are small, and the library has threads of its own.
torch.set_num_threads(1)


class Golden:
    """A golden file: tensors, and metadata as Python values."""

    def __init__(self, name: str):
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}
            self.meta = file.metadata()

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def get(self, key: str) -> torch.Tensor | None:
        return self.tensors.get(key)

    def flag(self, key: str) -> bool:
        return json.loads(self.meta[key].lower())


@pytest.fixture
def golden():
    return Golden


def golden_names() -> list[str]:
    names = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
    assert names, f"no golden vectors in {GOLDEN}"
    return names


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS distance."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach(), expected.detach().double()
    scale = expected.norm()
    distance = (found.double() - expected).norm()
    return float(distance / scale) if scale > 0 else float(distance)
