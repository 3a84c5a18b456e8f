from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.errors import UsageError
from farandole.core.placement import LAUNCHERS, slurm_first_host, slurm_tasks_on_node
from farandole.core.topology import Placement, find_placement

# What each launcher was seen to set for rank 5 of 6 on the second of two hosts, 4 and 2 ranks.
FARANDOLE = {
    "FARANDOLE_RANK": "5",
    "FARANDOLE_SIZE": "6",
    "FARANDOLE_LOCAL_RANK": "1",
    "FARANDOLE_LOCAL_SIZE": "2",
    "FARANDOLE_STORE": "127.0.0.1:4711",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run8",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node7-4242@1",
    "PMIX_RANK": "5",
}
MPICH = {
    "PMI_RANK": "5",
    "PMI_SIZE": "6",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_PORT": "node7:40001",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "5000",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "5",
    "FARANDOLE_SIZE": "6",
    "HOSTNAME": "train-digits-5",
}
ALL = {
    "farandole": FARANDOLE,
    "torchrun": TORCHRUN,
    "openmpi": OPENMPI,
    "mpich": MPICH,
    "slurm": SLURM,
    "horovod": HOROVOD,
    "kubernetes": KUBERNETES,
}
TELLS = {
    "farandole": ("127.0.0.1:4711", None),
    "torchrun": ("run8/node7/29500/0", "node7:29500"),
    "openmpi": ("prterun-node7-4242@1", None),
    "mpich": ("node7:40001", None),
    "slurm": ("77/0", "gpu07"),
    "horovod": ("10.0.0.1/5000", None),
    "kubernetes": ("train-digits", None),
}
ALONE = Placement(
    rank=0, size=1, local_rank=0, local_size=1, source="alone", job="", coordinator=None
)


def test_every_launcher_is_tried_here_in_order_of_precedence() -> None:
    assert list(ALL) == [launcher.source for launcher in LAUNCHERS]


@pytest.mark.parametrize("source", ALL)
def test_each_launchers_variables_are_understood(source: str) -> None:
    job, coordinator = TELLS[source]
    local = (None, None) if source == "kubernetes" else (1, 2)
    assert find_placement({**ALL[source], "PATH": "/bin"}) == Placement(
        rank=5,
        size=6,
        local_rank=local[0],
        local_size=local[1],
        source=source,
        job=job,
        coordinator=coordinator,
    )


@pytest.mark.parametrize("first", range(len(ALL)))
def test_who_started_the_process_last_wins(first: int) -> None:
    sources = list(ALL)[first:]
    environ: dict[str, str] = {}
    for source in sources:
        environ |= ALL[source]
    expected = sources[0]
    # FARANDOLE_SIZE is the Kubernetes job's there, and FARANDOLE_RANK is nobody's.
    assert find_placement(environ).source == expected


def test_nobody_speaks_of_a_process_that_is_alone() -> None:
    assert find_placement({"PATH": "/bin", "RANK": "", "MASTER_ADDR": ""}) == ALONE


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (source, missing)
        for source in ALL
        for missing in ("rank", "size")
        # Slurm's and Kubernetes' then mean that there is no job of many: see below.
        if source != "slurm" and (source, missing) != ("kubernetes", "size")
    ],
)
def test_half_of_a_place_is_refused_naming_both_variables(source: str, missing: str) -> None:
    launcher = next(each for each in LAUNCHERS if each.source == source)
    environ = {key: text for key, text in ALL[source].items() if key != getattr(launcher, missing)}
    with pytest.raises(UsageError) as caught:
        find_placement(environ)
    assert "FARANDOLE_RANK" in str(caught.value) or launcher.rank in str(caught.value)
    assert launcher.size in str(caught.value)


def test_half_a_place_does_not_matter_when_a_launcher_says_more() -> None:
    # Batch scripts export these for init_process_group and let Slurm tell the rank.
    environ = {**SLURM, "WORLD_SIZE": "6", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
    assert find_placement(environ).source == "slurm"


def test_half_of_our_own_place_always_matters() -> None:
    with pytest.raises(UsageError, match="FARANDOLE_RANK is set, but FARANDOLE_SIZE is not"):
        find_placement({**SLURM, "FARANDOLE_RANK": "1"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_lone_variable_with_a_common_name_means_nothing(name: str) -> None:
    assert find_placement({name: "3"}) == ALONE


def test_torch_variables_without_local_ones_leave_the_hosts_to_be_compared() -> None:
    place = find_placement({"RANK": "1", "WORLD_SIZE": "2"})
    assert (place.source, place.local_rank, place.local_size) == ("torchrun", None, None)
    assert (place.job, place.coordinator) == ("", None)
    place = find_placement({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert (place.local_rank, place.local_size) == (None, None)


@pytest.mark.parametrize(
    ("host", "port", "coordinator"),
    [
        ("node7", "", "node7"),
        ("10.0.0.1", "29500", "10.0.0.1:29500"),
        ("fe80::1", "29500", "[fe80::1]:29500"),
        ("[fe80::1]", "29500", "[fe80::1]:29500"),
    ],
)
def test_the_master_of_torch_is_the_coordinator(host: str, port: str, coordinator: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
    assert find_placement(environ).coordinator == coordinator


@pytest.mark.parametrize(
    "environ",
    [
        # A batch script, outside of any step.
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        # An interactive shell is a step of one task within an allocation of many.
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
    ],
    ids=["batch script", "interactive shell"],
)
def test_slurm_outside_of_a_step_of_many_is_alone(environ: dict[str, str]) -> None:
    assert find_placement(environ) == ALONE


def test_an_indexed_job_that_says_no_size_is_of_independent_processes() -> None:
    assert find_placement({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "sweep-3"}) == ALONE


def test_a_pod_may_have_another_host_name() -> None:
    place = find_placement({**KUBERNETES, "HOSTNAME": "custom"})
    assert (place.rank, place.job) == (5, "")


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("text", ["6", "600", "-1", "1.0", "one", "٣", "99999999999999999999"])
def test_a_rank_that_cannot_be_is_refused_naming_the_variable(source: str, text: str) -> None:
    launcher = next(each for each in LAUNCHERS if each.source == source)
    with pytest.raises(UsageError, match=launcher.rank):
        find_placement({**ALL[source], launcher.rank: text})


@pytest.mark.parametrize("source", [s for s in ALL if s not in ("slurm", "kubernetes")])
def test_local_ranks_must_fit_in(source: str) -> None:
    launcher = next(each for each in LAUNCHERS if each.source == source)
    with pytest.raises(UsageError, match=f"{launcher.local_rank}=2.*{launcher.local_size}=2"):
        find_placement({**ALL[source], launcher.local_rank: "2"})
    with pytest.raises(UsageError, match=f"{launcher.local_size}=7.*{launcher.size}=6"):
        find_placement({**ALL[source], launcher.local_size: "7"})
    without = {key: text for key, text in ALL[source].items() if key != launcher.local_size}
    place = find_placement(without)
    assert (place.local_rank, place.local_size) == (None, None)


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [
        ("4", 0, 4),
        ("4(x2),3", 0, 4),
        ("4(x2),3", 1, 4),
        ("4(x2),3", 2, 3),
        ("4(x2),3", 3, None),
        ("some", 0, None),
        ("4(x2", 0, None),
    ],
)
def test_slurm_counts_of_tasks(counts: str, node: int, tasks: int | None) -> None:
    assert slurm_tasks_on_node(counts, node) == tasks


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_slurm_counts_fold_out_again(tasks: list[int]) -> None:
    folded: list[list[int]] = []
    for each in tasks:
        if folded and folded[-1][0] == each:
            folded[-1][1] += 1
        else:
            folded.append([each, 1])
    text = ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in folded)
    assert [slurm_tasks_on_node(text, node) for node in range(len(tasks))] == tasks


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("r[1,3]n[02-04]-ib", "r1n02-ib"),
        ("", None),
    ],
)
def test_slurm_node_lists(nodes: str, first: str | None) -> None:
    assert slurm_first_host(nodes) == first


@given(
    st.dictionaries(
        st.sampled_from(sorted({name for each in ALL.values() for name in each})),
        st.one_of(st.integers(-1, 9).map(str), st.text("0a-, []().x", max_size=5)),
    )
)
def test_any_variables_give_a_possible_place_or_a_usage_error(environ: dict[str, str]) -> None:
    try:
        place = find_placement(environ)
    except UsageError as error:
        refusal = error.message
    else:
        _check_possible(place)
        return
    assert any(name in refusal for name in environ)


def _check_possible(place: Placement) -> None:
    assert 0 <= place.rank < place.size
    assert (place.local_rank is None) == (place.local_size is None)
    if place.local_rank is not None and place.local_size is not None:
        assert 0 <= place.local_rank < place.local_size <= place.size
