"""The store passes the checks that plug-in stores run, on disk and in memory."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from store_builders import inline_call

from flexmarl.core.ids import PolicyName
from flexmarl.core.protocols import ExperienceStore, PolicyColumns
from flexmarl.store import SqliteStore
from flexmarl.testing import store_contract
from flexmarl.testing.store_contract import STORE_CHECKS, Check

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("is_on_disk", [True, False])
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_g2_the_store_keeps_the_contract_of_every_store(tmp_path: Path, check: Check, is_on_disk: bool) -> None:
    async def make_store(columns: Mapping[PolicyName, PolicyColumns]) -> ExperienceStore:
        return await SqliteStore.open(tmp_path if is_on_disk else None, inline_call, columns)

    asyncio.run(check(make_store))


def test_every_check_is_in_the_list() -> None:
    checks = {name for name in vars(store_contract) if name.startswith("check_")}
    assert {check.__name__ for check in STORE_CHECKS} == checks
