"""Worker extension that lets a vLLM server load weights from a folder.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls headrace.rollouts.vllm_worker.FolderWeights --served-model-name policy

Adds the method that `OpenAIEngine.take_weights` calls through `POST /collective_rpc`. Parameters are copied in place, layer by layer, so that prepacked
layers of CPU builds are repacked; the probe shows whether they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class FolderWeights:
    """Mixed into vLLM's worker class; `self` is the worker."""

    model_runner: Any

    def load_weights_from_folder(self, folder: str) -> str:
        """Load `model.safetensors` of a version's folder. Returns the folder."""
        from safetensors.torch import load_file

        weights = load_file(str(Path(folder) / "model.safetensors"))
        self.model_runner.model.load_weights(weights.items())
        return folder
