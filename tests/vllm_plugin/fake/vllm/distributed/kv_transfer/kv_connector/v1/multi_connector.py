from dataclasses import dataclass


@dataclass
class MultiKVConnectorWorkerMetadata:
    metadata: tuple


class Base:
    def get_kv_connector_kv_cache_events(self):
        return None


class MultiConnector(Base):
    def __init__(self, connectors):
        self._connectors = connectors

    def update_connector_output(self, connector_output):
        for connector in self._connectors:
            connector.update_connector_output(connector_output)
