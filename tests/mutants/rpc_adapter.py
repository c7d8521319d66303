"""Faults in the adapter of torch RPC; the packages of the other adapters are not in the environment."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "workers",
        old='warnings.filterwarnings("ignore", message=_OWN_WARNING)',
        fault="init_rpc's own warning is printed on every rank",
        tests="tests/integrations/test_rpc.py",
    ),
    Mutant(
        "_selected_interface",
        old="del os.environ[_INTERFACE]",
        fault="TP_SOCKET_IFNAME remains set after workers()",
        tests="tests/integrations/test_rpc.py",
    ),
    Mutant(
        "workers",
        old="_require_no_agent()",
        fault="The inner one of two nested blocks calls init_rpc a second time, instead of an error.",
        tests="tests/integrations/test_rpc.py -k blocks",
    ),
    Mutant(
        "_shut_down",
        old="number == 1",
        new="number",
        fault="The timeout at the end of a later block does not name the remote references.",
        tests="tests/integrations/test_rpc.py -k blocks",
    ),
    Mutant(
        "workers",
        old="require_world(world)",
        fault="workers(None) is an AttributeError.",
        tests="tests/integrations/test_rpc.py -k must_be_a_world",
    ),
]
