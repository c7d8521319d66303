"""The devices that a process sees."""

from __future__ import annotations

from collections.abc import Callable

from tests.launching import Outcome

Run = Callable[..., Outcome]
UUIDS = (
    "print(*(torch.emulated.get_device_properties(i).uuid for i in range(torch.accelerator.device_count())), sep='\\n')"
)


def test_visible_devices_have_the_same_uuid_in_each_process(run_on_device: Run) -> None:
    uuids = run_on_device(UUIDS, EMULATED_DEVICES="3").stdout.split()
    assert len(set(uuids)) == 3, uuids
    visible = f"2,{uuids[0]},7,1"
    assert run_on_device(UUIDS, EMULATED_DEVICES="3", EMULATED_VISIBLE_DEVICES=visible).stdout.split() == [
        uuids[2],
        uuids[0],
    ]
    absent = run_on_device("print(torch.emulated.is_available())", EMULATED_VISIBLE_DEVICES="")
    assert absent.stdout.split() == ["False"], absent
