"""vLLM's plug-in: publisher, event aggregation and connectors, by one ``pip install`` beside vLLM.

vLLM calls :func:`kvevents.integrations.vllm.plugin.register` in each of its processes. Nothing else of the
package imports vLLM.
"""
