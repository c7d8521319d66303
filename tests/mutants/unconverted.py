"""Mutants of the code for programs that do not call `bootstrap()`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "unconverted._Store.arguments",
        old="dist.PrefixStore(str(group), store)",
        new="dist.PrefixStore(str(0), store)",
        fault="A group that is started anew may connect to the addresses of the first one.",
        tests="tests/launch/test_unconverted.py -k test_an_unchanged_program",
    ),
    Mutant(
        "unconverted._bootstrap",
        old="(last := session.current()) is not None and last.is_open",
        new="False",
        fault="With --backend, a second init_process_group() after destroy_process_group() starts no group.",
        tests="tests/launch/test_unconverted.py -k test_another_backend",
    ),
    Mutant(
        "unconverted._wrap_init_process_group.init_process_group",
        old="is_child and PARENT_VARIABLE in os.environ",
        new="False",
        fault="Ranks that each rank has spawned meet at one store, and hang or fail with errors of Gloo.",
        tests="tests/launch/test_unconverted.py -k test_ranks_that_the_program_spawns",
    ),
    Mutant(
        "unconverted._Store.of",
        old="used != port",
        new="False",
        fault="A program with a port of its own connects to the store of `mpicomm run`.",
        tests="tests/unit/test_unconverted.py",
    ),
    Mutant(
        "rank_variables._reachable",
        old="(address, parent.port)",
        new="(address, parent.store_port)",
        fault="A rank that tests an address starts the store: a program that connects nothing is not reported.",
        tests="tests/unit/test_rank_variables.py -k test_an_address_that_cannot_be_reached",
    ),
    Mutant(
        "rank_variables.of_rank",
        old="name not in environ",
        new="True",
        fault="The address that the user has set is replaced.",
        tests="tests/unit/test_rank_variables.py -k test_variables_of_the_user",
    ),
    Mutant(
        "rank_variables.without_colors",
        old='parent is None or parent.has_terminal or environ.get("FORCE_COLOR")',
        new='parent is None or environ.get("FORCE_COLOR")',
        fault="Ranks print no colours on a terminal.",
        tests="tests/unit/test_rank_variables.py -k test_no_colors",
    ),
    Mutant(
        "exit_hooks.arm",
        old="previous = previous.previous",
        new="pass",
        fault="An error is printed in the form of another hook, which does not say that the job is aborted.",
        tests="tests/launch/test_unconverted.py -k test_the_group_of_a_converted_program",
    ),
    Mutant(
        "remedies._of_missing_variable",
        old="failure.environ.get(name)",
        new="False",
        fault="A KeyError of a dictionary of the program is explained by the launch.",
        tests="tests/unit/test_remedies.py -k test_no_remedy",
    ),
    Mutant(
        "request._other_launcher",
        old="name in names",
        new="False",
        fault="Each rank of `mpicomm run accelerate launch` starts a job of its own.",
        tests="tests/unit/test_launch_commands.py -k test_other_launchers",
    ),
]
