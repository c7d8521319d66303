"""Faults in the start of large jobs: the address of the fastest network, copies of the environment, bad hosts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "by_speed",
        old="(network, -speeds[name], address not in named)",
        new="(-speeds[name], address not in named)",
        fault="Rank 0 prefers a virtual interface, whose speed the kernel invents, to InfiniBand without a speed.",
        tests="tests/unit/test_rendezvous.py -k fastest_network",
    ),
    Mutant(
        "by_speed",
        old="(network, -speeds[name], address not in named)",
        new="(network, address not in named)",
        fault="Rank 0 prefers the network of its host name to a faster one.",
        tests="tests/unit/test_rendezvous.py -k fastest_network",
    ),
    Mutant(
        "host_info.megabits_of_interface",
        old="int(text) if text.isdigit() else 0",
        new="int(text)",
        fault="bootstrap() fails on a host that has an interface without a speed.",
        tests="tests/unit/test_rendezvous.py -k the_speed_of_devices",
    ),
    Mutant(
        "host_info.megabits_of_interface",
        old='(directory / "device").exists() or (directory / "bonding").exists()',
        new="True",
        fault="Rank 0 prefers a bridge of containers to a real network of 1 Gbit/s.",
        tests="tests/unit/test_rendezvous.py -k the_speed_of_devices",
    ),
    # -- copies of the environment -----------------------------------------------------------------------------
    Mutant(
        "StagedEnv.staged",
        old="dataclasses.replace(request, program=(own_python, *request.program[1:]), python=own_python)",
        new="dataclasses.replace(request, program=(own_python, *request.program[1:]))",
        fault="With --log-dir, the wrapper of each rank starts the Python of the shared file system.",
        tests="tests/unit/test_staged_env.py -k writes_the_logs",
    ),
    Mutant(
        "StagedEnv.staged",
        old="request.program[0] != python or not Path(python).is_relative_to(self.prefix)",
        new="False",
        fault="--stage-env replaces a command by Python, or ignores that the Python is not in the copy.",
        tests="tests/unit/test_staged_env.py -k other_programs_are_refused",
    ),
    Mutant(
        "env_copy.reserve",
        old="(free := disk.f_bavail * disk.f_frsize) < size",
        new="(free := disk.f_bavail * disk.f_frsize) < 0",
        fault="Ranks are started only after a disk that is too small has been filled.",
        tests="tests/unit/test_staged_env.py -k too_small",
    ),
    Mutant(
        "env_copy.copy_to_nodes",
        old="remove(copy)",
        fault="After an error on one node, incomplete copies remain on all.",
        tests="tests/launch/test_stage_env.py -k leaves_no_copy_on_any",
    ),
    Mutant(
        "env_copy._transfer",
        old="for _ in parts:\n    pass",
        new="pass",
        fault="If tar cannot start on one node, the others wait in a broadcast for ever.",
        tests="tests/launch/test_stage_env.py -k cannot",
    ),
    Mutant(
        "stage_env._run_on_copies",
        old="copied.stopped_by is None and copied.status",
        new="False",
        fault="The ranks are started although the environment was not copied to every node.",
        tests="tests/launch/test_stage_env.py -k error_of_tar",
    ),
    Mutant(
        "stage_env.run",
        old="_remove(request, env.copy, seconds)",
        new="pass",
        fault="The copies remain on the nodes.",
        tests="tests/launch/test_stage_env.py -k after_a_failure_of_a_rank",
    ),
    Mutant(
        "stage_env._noting_signals",
        old="(*STOPS, *WARNINGS, signal.SIGQUIT)",
        new="WARNINGS",
        fault="A second signal leaves copies on the nodes.",
        tests="tests/launch/test_stage_env.py -k after_signals",
    ),
    Mutant(
        "stage_env._noting_signals",
        old="(*STOPS, *WARNINGS, signal.SIGQUIT)",
        new="STOPS",
        fault="The warning of a scheduler during the removal leaves copies on the nodes.",
        tests="tests/launch/test_stage_env.py -k after_signals",
    ),
    Mutant(
        "env_copy._packing",
        old="left_out(prefix)",
        new="()",
        fault="Copies of conda's base contain all environments.",
        tests="tests/launch/test_stage_env.py -k files_links_modes",
    ),
    Mutant(
        "launching._unlogged",
        old="commands.without_placement(request.launcher_arguments)",
        new="request.launcher_arguments",
        fault="The copy of the environment fails with masks of cores for the ranks.",
        tests="tests/unit/test_staged_env.py -k once_on_every_host",
    ),
    # -- bad hosts ---------------------------------------------------------------------------------------------
    Mutant(
        "node_range.without",
        old="_without_domain(name) not in others",
        new="True",
        fault="A host that reports its name without the domain of the list is not left out.",
        tests="tests/unit/test_node_range.py -k left_out_by_name",
    ),
    Mutant(
        "node_range.without",
        old="name.lower() not in exact",
        new="True",
        fault="A failure on one host leaves out the host of another domain with the same name.",
        tests="tests/unit/test_node_range.py -k left_out_by_name",
    ),
    Mutant(
        "node_range._without_domain",
        old="name.lower()",
        new="name",
        fault="A host is not left out whose name is written in capital letters.",
        tests="tests/unit/test_node_range.py -k left_out_by_name",
    ),
    Mutant(
        "attempts._placement",
        old="node_range.addresses(hosts)",
        new="[]",
        fault="With addresses in --hosts, --exclude-failed leaves out no host.",
        tests="tests/launch/test_run.py -k mistake_is_an_error",
    ),
    Mutant(
        "Job.receive",
        old="not self.cause",
        new="True",
        fault="A host is left out whose ranks failed only because others had failed.",
        tests="tests/unit/test_job_listener.py -k hosts_of_the_first_failure",
    ),
    Mutant(
        "Coordinator._abort",
        old="self._report_failure(cause, ranks)",
        new="self._report_failure(cause, ())",
        fault="--exclude-failed knows no host on which a rank was killed.",
        tests="tests/unit/test_coordinator.py",
    ),
    Mutant(
        "attempts.run",
        old="placement.without(end.failed_hosts).answering(request)",
        new="placement.answering(request)",
        fault="--exclude-failed leaves out no host.",
        tests="tests/unit/test_attempts.py -k failed_host",
    ),
]
