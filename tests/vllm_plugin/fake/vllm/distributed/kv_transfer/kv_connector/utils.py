from vllm.v1.outputs import KVConnectorOutput


class KVOutputAggregator:
    def __init__(self, expected_finished_count):
        self._expected_finished_count = expected_finished_count

    @classmethod
    def from_connector(cls, connector, world_size):
        return cls(connector.get_finished_count() or world_size)

    def aggregate(self, outputs, output_rank=0):
        if not outputs[output_rank]:
            return None
        result = outputs[output_rank]
        result.kv_connector_output = KVConnectorOutput()
        return result
