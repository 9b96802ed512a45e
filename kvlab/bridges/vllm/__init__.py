"""kvlab's verdict inside vLLM: kv_connector `CrossoverConnector`, kv_connector_module_path `kvlab.bridges.vllm`.

Written against vLLM 0.32 (V1 engine). docs/vllm.md says how to switch it on.
"""

from kvlab.bridges.vllm.connector import CrossoverConnector

__all__ = ["CrossoverConnector"]
