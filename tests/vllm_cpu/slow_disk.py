"""vLLM's example disk connector behind a disk as slow as a test wants it."""

from __future__ import annotations

import time
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class SlowDiskConnector(ExampleConnector):
    """Sleeps `seconds_per_byte` (extra config; may be changed while it runs) for each byte of the files it reads."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.seconds_per_byte = self._kv_transfer_config.get_from_extra_config("seconds_per_byte", 0.0)

    def start_load_kv(self, forward_context, **kwargs):
        super().start_load_kv(forward_context, **kwargs)
        for request in self._get_connector_metadata().requests:
            if not request.is_store:
                folder = Path(self._generate_foldername_debug(request.token_ids, request.mm_hashes))
                time.sleep(self.seconds_per_byte * sum(file.stat().st_size for file in folder.iterdir()))
