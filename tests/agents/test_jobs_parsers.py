"""Parsers of the collector `jobs`: identities, devices, control groups, prolog files, pods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.jobs import gpu_assignment, kubernetes, processes, slurm_prolog
from agents.collectors.jobs import processes as cgroups
from agents.collectors.jobs.gpu_assignment import (
    MAX_DEVICES,
    GpuNumbers,
    find_devices,
    load_gpu_numbers,
    parse_device_list,
)
from agents.collectors.jobs.process_identity import IDENTITY_VARIABLES, MAX_NAME_CHARS, clean_name, identify_process
from agents.collectors.jobs.processes import CgroupOwner, parse_cgroup
from agents.protobuf import MalformedMessage
from tests.agents.kubelet_double import KubeletDouble

UID = "0b1c2d3e-1111-2222-3333-444455556666"
CONTAINER = "ab" * 32
UUID = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"

# --- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ("SLURM_JOB_ID=81 SLURM_PROCID=17 SLURM_STEP_ID=0 SLURM_NTASKS=64", ("81", "slurm", 17, 64, "", 2)),
        ("SLURM_JOB_ID=81 SLURM_PROCID=0", ("81", "slurm", 0, None, "", 1)),
        ("SLURM_JOB_ID=90 SLURM_ARRAY_JOB_ID=88 SLURM_ARRAY_TASK_ID=2 SLURM_PROCID=0", ("90", "slurm", 0, None, "", 1)),
        ("SLURM_JOB_ID=92 SLURM_HET_JOB_ID=91 SLURM_PROCID=5 SLURM_STEP_ID=0", ("91", "slurm", 5, None, "", 2)),
        ("SLURM_JOB_ID=81 SLURM_PROCID=1 RANK=9 WORLD_SIZE=16 PP_RANK=2", ("81", "slurm", 9, 16, "2", 3)),
        (
            "RANK=3 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=none MASTER_ADDR=localhost MASTER_PORT=29500",
            ("n1-29500", "torchrun", 3, 8, "", 3),
        ),
        ("RANK=3 MASTER_ADDR=10.0.0.7 MASTER_PORT=29500", ("10-0-0-7-29500", "torchrun", 3, None, "", 3)),
        ("RANK=3 TORCHELASTIC_RUN_ID=llama.7b", ("llama-7b", "torchrun", 3, None, "", 3)),
        (
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 PMIX_NAMESPACE=prterun-n1-77@1",
            ("prterun-n1-77@1", "mpi", 2, 4, "", 2),
        ),
        (
            "POD_NAMESPACE=ml JOB_NAME=llama RANK=1 FLEETPULSE_STAGE=embed",
            ("ml/llama", "kubernetes", 1, None, "embed", 3),
        ),
        ("FLEETPULSE_JOB=run7 FLEETPULSE_RANK=5 RANK=1 SLURM_JOB_ID=81", ("run7", "slurm", 5, None, "", 3)),
        ("SLURM_JOB_ID=81 RANK=9 WORLD_SIZE=16 FLEETPULSE_STAGES=4", ("81", "slurm", 9, 16, "2", 3)),
        ("SLURM_JOB_ID=81 RANK=-1 SLURM_PROCID=4 SLURM_STEP_ID=1", ("81", "slurm", 4, None, "", 2)),
    ],
)
def test_an_environment_gives_job_rank_world_size_and_stage(environment: str, wanted: tuple[object, ...]) -> None:
    who = identify_process(dict(word.split("=", 1) for word in environment.split()), "n1")
    assert who is not None
    assert (who.job, who.scheduler, who.rank, who.world_size, who.stage, who.claim) == wanted


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "3"}, {"SLURM_JOB_ID": "x"}, {"MASTER_ADDR": "n1"}, {"JOB_NAME": "a"}, {"FLEETPULSE__SPOOL": "x"}],
)
def test_an_environment_without_a_job_gives_none(environment: dict[str, str]) -> None:
    assert identify_process(environment, "n1") is None


@given(
    st.dictionaries(
        st.sampled_from(sorted(IDENTITY_VARIABLES)), st.one_of(st.text(max_size=300), st.integers().map(str))
    )
)
def test_names_from_any_environment_are_bounded_and_have_no_dot(environment: dict[str, str]) -> None:
    who = identify_process(environment, "n1")
    if who is not None:
        assert 0 < len(who.job) <= MAX_NAME_CHARS
        assert who.job == clean_name(who.job)
        assert "." not in who.job
        assert (who.rank_entity or "rank:").encode().isascii()
        assert who.rank is None or 0 <= who.rank < 2**24
    held = find_devices(environment, who)
    assert len(held.tokens) <= MAX_DEVICES


@given(st.binary(max_size=2000))
def test_from_any_bytes_only_known_variables_are_kept(environment: bytes) -> None:
    kept = processes.parse_environment(environment)
    assert kept.keys() <= IDENTITY_VARIABLES | gpu_assignment.DEVICE_VARIABLES | {"HOSTNAME"}


def test_from_an_environment_only_known_variables_are_kept() -> None:
    environment = b"TOKEN=hunter2\0RANK=3\0RANK=4\0nothing\0CUDA_VISIBLE_DEVICES=1\0SLURM_JOB_ID\0=x"
    assert processes.parse_environment(environment) == {"RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}


@given(st.binary(max_size=300))
def test_any_stat_line_gives_a_start_time_or_none(stat: bytes) -> None:
    assert processes.parse_start_time(stat) is None or isinstance(processes.parse_start_time(stat), int)


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ("SLURM_JOB_GPUS=0-3 CUDA_VISIBLE_DEVICES=0,1,2,3 RANK=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4", ("2",)),
        ("SLURM_STEP_GPUS=4,5 CUDA_VISIBLE_DEVICES=0,1 RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", ("5",)),  # hidden
        ("SLURM_STEP_GPUS=4,5 CUDA_VISIBLE_DEVICES=4,5 RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", ("5",)),
        ("SLURM_JOB_GPUS=0,1,2,3 CUDA_VISIBLE_DEVICES=2 SLURM_PROCID=2 SLURM_LOCALID=2", ("2",)),
        (
            "SLURM_JOB_GPUS=0-3 CUDA_VISIBLE_DEVICES=0,1,2,3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_TASKS_PER_NODE=1(x2)",
            tuple("0123"),
        ),
        (f"NVIDIA_VISIBLE_DEVICES={UUID},GPU-x RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", ("GPU-x",)),
        (f"NVIDIA_VISIBLE_DEVICES={UUID},GPU-x CUDA_VISIBLE_DEVICES=1", ("GPU-x",)),
        ("NVIDIA_VISIBLE_DEVICES=all CUDA_VISIBLE_DEVICES=1,-1,2", ("1",)),
        ("CUDA_VISIBLE_DEVICES=NoDevFiles", ()),
        ("CUDA_VISIBLE_DEVICES= RANK=0 LOCAL_RANK=0", ()),
        ("CUDA_VISIBLE_DEVICES=MIG-GPU-8/1/0", ("MIG-GPU-8/1/0",)),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", ("2", "3")),
        ("CUDA_VISIBLE_DEVICES=0 RANK=3 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4", ("0",)),
        ("CUDA_VISIBLE_DEVICES=0,1 RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=0", ("1",)),  # 0 is unknown
        ("CUDA_VISIBLE_DEVICES=0,1 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_TASKS_PER_NODE=0(x2)", ("0", "1")),
        ("ROCR_VISIBLE_DEVICES=2,3 RANK=0 LOCAL_RANK=0", ("2",)),
        ("", ()),
    ],
)
def test_the_devices_of_a_process_and_its_rank(environment: str, wanted: tuple[str, ...]) -> None:
    environment_of_process = {"FLEETPULSE_JOB": "x", **dict(word.split("=", 1) for word in environment.split())}
    assert find_devices(environment_of_process, identify_process(environment_of_process)).tokens == wanted


def test_a_torchrun_rank_without_a_list_uses_the_gpu_of_its_local_rank_if_it_exists() -> None:
    environment_of_process = {"RANK": "9", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    held = find_devices(environment_of_process, identify_process(environment_of_process))
    assert held.assumed
    assert GpuNumbers({UUID: 1}).list_entities("n1", held.tokens, held.assumed) == ("gpu:n1.1",)
    assert GpuNumbers().list_entities("n1", held.tokens, held.assumed) == ()


@given(st.text(max_size=400))
def test_any_list_of_devices_is_bounded(text: str) -> None:
    found = parse_device_list(text)
    assert found is None or len(found) <= MAX_DEVICES


def test_a_range_without_end_is_bounded() -> None:
    found = parse_device_list("0-9999,0-9999")
    assert found is not None
    assert len(found) == MAX_DEVICES


def test_gpu_numbers_follow_pci_addresses_and_not_minor_numbers(tmp_path: Path) -> None:
    for number, folder in enumerate(("0000:41:00.0", "0000:07:00.0", "nonsense")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "information").write_text(f"GPU UUID:\t {UUID[:-1]}{number}\nDevice Minor: \t {number}\n")
    found = load_gpu_numbers(None, tmp_path, tmp_path / "absent")
    assert (found.find_number(f"{UUID[:-1]}1"), found.find_number(f"{UUID[:-1]}0")) == (0, 1)
    assert found.find_number("00000000:41:00.0") == found.find_number(f"MIG-{UUID[:-1]}0/3/0") == 1
    assert found.find_number("7") is found.find_number("GPU-else") is None


def test_without_a_driver_a_number_is_used_unchanged() -> None:
    assert GpuNumbers().list_entities("n1", ("3", "GPU-x", "3", "4000")) == ("gpu:n1.3",)


# --- control groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5:devices:/slurm/uid_0/job_81/step_0/task_3\n1:name=systemd:/x", CgroupOwner("81", "0")),
        ("5:memory:/slurm_gpu001/uid_1000/job_81/step_batch", CgroupOwner("81", "batch")),
        ("0::/system.slice/slurmstepd.scope/job_81/step_extern/user/task_0", CgroupOwner("81", "extern")),
        ("0::/system.slice/gpu001_slurmstepd.scope/job_81/step_4/user/task_0", CgroupOwner("81", "4")),
        (f"0::/kubepods/burstable/pod{UID}/{CONTAINER}", CgroupOwner(pod=UID, container=CONTAINER)),
        (
            "0::/kubepods.slice/kubepods-besteffort.slice/"
            f"kubepods-besteffort-pod{UID.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope",
            CgroupOwner(pod=UID, container=CONTAINER),
        ),
        (
            f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID.replace('-', '_')}.slice",
            CgroupOwner(pod=UID),
        ),
        (f"3:cpu:/kubepods/pod{UID}/crio-{CONTAINER}", CgroupOwner(pod=UID, container=CONTAINER)),
        ("0::/user.slice/job_81", CgroupOwner()),
        ("", CgroupOwner()),
    ],
)
def test_a_control_group_gives_job_or_pod(text: str, wanted: CgroupOwner) -> None:
    assert parse_cgroup(text.encode()) == wanted


@given(st.binary(max_size=400).map(lambda text: b"0::/kubepods/pod" + text + b"/slurm/uid_1/job_" + text))
def test_any_bytes_of_a_control_group_are_parsed(text: bytes) -> None:
    assert isinstance(parse_cgroup(text), CgroupOwner)
    assert isinstance(parse_cgroup(text * 100), cgroups.CgroupOwner)


# --- prolog files ----------------------------------------------------------------------------------------------------


def test_prolog_files_are_reread_when_changed_and_only_known_keys_are_kept(tmp_path: Path) -> None:
    folder = slurm_prolog.PrologFiles(tmp_path)
    for name in ("81.env", ".81.x", "82.env.tmp.3", "x.env"):
        (tmp_path / name).write_text("# of the prolog\nSLURM_JOB_ID=81\nSLURM_JOB_GPUS=0,1\nAWS_SECRET=x\n\nno line\n")
    assert folder.read_jobs() == {"81": {"SLURM_JOB_ID": "81", "SLURM_JOB_GPUS": "0,1"}}
    (tmp_path / "new").write_text("SLURM_JOB_GPUS=2\n")
    (tmp_path / "new").replace(tmp_path / "81.env")
    assert folder.read_jobs() == {"81": {"SLURM_JOB_GPUS": "2"}}
    (tmp_path / "81.env").unlink()
    assert folder.read_jobs() == {}
    assert slurm_prolog.PrologFiles(tmp_path / "absent").read_jobs() == {}


@given(st.binary(max_size=500))
def test_any_bytes_of_a_prolog_file_are_parsed(text: bytes) -> None:
    found = slurm_prolog.parse_prolog_file(b"SLURM_JOB_ID=" + text)
    assert found.keys() <= slurm_prolog.PROLOG_VARIABLES
    assert all(len(value) <= slurm_prolog.MAX_VALUE_CHARS for value in found.values())


# --- pods ------------------------------------------------------------------------------------------------------------


def pod(labels: dict[str, str], **more: object) -> dict[str, object]:
    limits = {"limits": {"nvidia.com/gpu": "1", "cpu": "8"}}
    return {
        "metadata": {"namespace": "ml", "name": "p-0", "uid": UID, "labels": labels},
        "spec": {"containers": [{"name": "c", "resources": limits}]},
        "status": {"phase": "Running", "containerStatuses": [{"containerID": f"containerd://{CONTAINER}"}]},
        **more,
    }


@pytest.mark.parametrize(
    ("labels", "job", "rank"),
    [
        ({"batch.kubernetes.io/job-name": "a", "batch.kubernetes.io/job-completion-index": "3"}, "ml/a", 3),
        ({"job-name": "a", "batch.kubernetes.io/job-completion-index": "0"}, "ml/a", 0),
        ({"training.kubeflow.org/job-name": "a", "training.kubeflow.org/replica-index": "1"}, "ml/a", None),
        ({"jobset.sigs.k8s.io/jobset-name": "a", "job-name": "a-workers-0"}, "ml/a", None),
        (
            {
                "leaderworkerset.sigs.k8s.io/name": "a",
                "leaderworkerset.sigs.k8s.io/group-index": "2",
                "leaderworkerset.sigs.k8s.io/worker-index": "1",
            },
            "ml/a-2",
            1,
        ),
        ({"volcano.sh/job-name": "a"}, "ml/a", None),
        ({"fleetpulse/job": "mine", "fleetpulse/rank": "7", "job-name": "a"}, "ml/mine", 7),
        ({"app": "x"}, "ml/p-0", None),
    ],
)
def test_labels_give_the_job_and_sometimes_the_rank(labels: dict[str, str], job: str, rank: int | None) -> None:
    (found,) = kubernetes.parse_pod_list(json.dumps({"items": [pod(labels)]}).encode()).values()
    assert (found.job, found.rank, found.uid, found.containers) == (job, rank, UID, (CONTAINER,))
    assert (found.requested, "app" in found.labels) == (1, False)


def test_malformed_and_ended_pods_are_skipped() -> None:
    bad = [None, 3, {}, {"metadata": []}, {"metadata": {"name": 1}}, pod({}, status={"phase": "Succeeded"})]
    whole = {"items": [*bad, pod({}, spec={"containers": 3}, status=4)]}
    assert list(kubernetes.parse_pod_list(json.dumps(whole).encode())) == [("ml", "p-0")]
    for answer in (b"", b"[]", b'{"items": {}}', b"\xff", b'{"kind": "Status"}', b"[" * 100_000):
        with pytest.raises(ValueError, match=r"PodList|Expecting|utf-8"):
            kubernetes.parse_pod_list(answer)


def test_the_kubelets_answer_gives_each_accelerator_once(tmp_path: Path) -> None:
    double = KubeletDouble(tmp_path)
    double.hold("ml", "a", {"c": {"nvidia.com/gpu": [UUID, UUID, "GPU-x::1"], "cpu": ["1"]}, "d": {"rdma/hca": ["h"]}})
    double.hold("ml", "b", {"c": {"aws.amazon.com/neuroncore": ["5"], "aws.amazon.com/neuron": ["2"]}})
    double.hold("ml", "cpu-only", {"c": {"memory": ["0"]}})
    found = kubernetes.parse_pod_resources(double.response())
    assert {key: one.devices for key, one in found.items()} == {
        ("ml", "a"): (UUID, "GPU-x"),
        ("ml", "b"): ("core:5", "2"),
    }
    assert GpuNumbers().list_entities("n1", found["ml", "b"].devices) == ("gpu:n1.2",)


@given(st.binary(max_size=300))
def test_any_answer_of_a_kubelet_gives_pods_or_an_error(answer: bytes) -> None:
    try:
        found = kubernetes.parse_pod_resources(answer)
    except MalformedMessage:
        return
    assert len(found) <= kubernetes.MAX_PODS
