"""A kubelet's pod-resources socket: a real gRPC server (grpcio) with the schema that Kubernetes publishes as v1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SCHEMA = {  # message -> (field, number, repeated, type); of k8s.io/kubelet/pkg/apis/podresources/v1/api.proto
    "ContainerDevices": (("resource_name", 1, False, "string"), ("device_ids", 2, True, "string")),
    "ContainerResources": (("name", 1, False, "string"), ("devices", 2, True, "ContainerDevices")),
    "PodResources": (
        *(("name", 1, False, "string"), ("namespace", 2, False, "string")),
        ("containers", 3, True, "ContainerResources"),
    ),
    "ListPodResourcesResponse": (("pod_resources", 1, True, "PodResources"),),
}


def _response() -> Any:
    """Returns the class of the answer."""
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, number, repeated, kind in fields:
            text = kind == "string"
            message.field.add(
                name=field,
                number=number,
                label=3 if repeated else 1,
                type=9 if text else 11,
                type_name=None if text else f".v1.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))


class KubeletDouble:
    """`hold` sets the devices of a pod's container; `answer` replaces the whole answer by other bytes."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "kubelet.sock"
        self.answer: bytes | None = None
        self.asked = 0
        self._pods: dict[tuple[str, str], Mapping[str, Mapping[str, Sequence[str]]]] = {}
        self._server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(self._list)
        handlers = grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self._server.add_insecure_port(f"unix:{self.socket}")

    def __enter__(self) -> KubeletDouble:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(0).wait()

    def hold(self, namespace: str, pod: str, containers: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """containers: name -> resource -> device ids."""
        self._pods[namespace, pod] = containers

    def release(self, namespace: str, pod: str) -> None:
        del self._pods[namespace, pod]

    def _list(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.asked += 1
        return self.response() if self.answer is None else self.answer

    def response(self) -> bytes:
        """Returns the answer encoded by protobuf's own library."""
        whole = _response()()
        for (namespace, name), containers in self._pods.items():
            pod = whole.pod_resources.add(name=name, namespace=namespace)
            for container, devices in containers.items():
                one = pod.containers.add(name=container)
                for resource, ids in devices.items():
                    one.devices.add(resource_name=resource, device_ids=ids)
        found: bytes = whole.SerializeToString()
        return found
