"""Small alert worlds, each of which shows one thing that goes wrong easily: inhibition in groups, changed routes.

python -m tests.pipeline.alert_worlds --examples
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.receivers import Route
from tests.pipeline.alert_settings import Setting
from tests.pipeline.alert_worlds import World

A, B, SOURCE = "gpu:n0.0", "gpu:n0.1", "cdu:c0"
OPEN_A, OPEN_B = ("open", A, "page", "hot"), ("open", B, "page", "hot")
OPEN_SOURCE, WAIT = ("open", SOURCE, "page", "coolant"), ("minutes", 4)
HOOK = Route("hook", group_by=("alertname",), group_wait="30s", group_interval="30s", repeat_interval="10m")
PAGER, DESK = replace(HOOK, receiver="pager"), replace(HOOK, receiver="desk")
ALONE = Setting()
BELOW = {"matchers": ['rack="r0"'], "group_wait": "0s"}
REGEX = {"matchers": ['rack=~"r0"'], "group_wait": "0s"}
LONG = ("hours", 1)
ALL = {"receiver": "desk", "matchers": ['severity=~"critical|warning"'], "group_wait": "0s", "group_by": []}
LATER = {**ALL, "group_by": ["alertname", "rack"], "group_wait": "10s"}
TWICE = replace(HOOK, group_wait="0s", routes=({**ALL, "continue": True}, LATER))
LOST, BACK, FEW = ("away", "desk", "lost"), ("back", "desk"), ("seconds", 3)
GONE = ("configure", Setting(removed=("desk",)))
SECOND, RESTART = ("seconds", 1), ("restart",)


def end(cause: str) -> tuple[str, str, bool]:
    return "end", cause, True


def use(setting: Setting) -> tuple[str, Setting]:
    return "configure", setting


EXAMPLES = {
    "two pages of one group end one after the other while a rule inhibits both": World(
        Setting(HOOK, "rack"),
        20,
        (OPEN_A, OPEN_B, WAIT, OPEN_SOURCE, WAIT, end(B), WAIT, end(A), WAIT),
    ),
    "an acknowledgement of a grouped page expires": World(
        Setting(HOOK), 20, (OPEN_A, ("minutes", 1), ("acknowledge", A, 0.02), ("minutes", 2), ("settle",))
    ),
    "routes go while a page waits in its group, and it ends": World(
        Setting(HOOK), 20, (OPEN_A, use(ALONE), end(A), WAIT)
    ),
    "routes go while a rule holds a page in its group, it ends, then its source": World(
        Setting(HOOK, "rack"),
        20,
        (OPEN_SOURCE, OPEN_B, WAIT, use(Setting(rules="rack")), end(B), WAIT, end(SOURCE), WAIT),
    ),
    "routes go while a rule holds a page in its group, its labels change, then its source ends": World(
        Setting(HOOK, "rack"),
        20,
        (OPEN_SOURCE, OPEN_B, WAIT, use(Setting(rules="rack")), ("blame", B), WAIT, end(SOURCE), WAIT),
    ),
    "routes go, then the labels of a page change that was sent in a group": World(
        Setting(PAGER), 20, (OPEN_A, WAIT, use(ALONE), ("blame", A), WAIT)
    ),
    "routes come that lead elsewhere, then the labels of a page change that was sent alone": World(
        ALONE, 20, (OPEN_A, WAIT, use(Setting(PAGER)), ("blame", A), WAIT, end(A), WAIT)
    ),
    "routes come that lead elsewhere while a rule holds a page that was sent with other labels": World(
        Setting(rules="rack"),
        20,
        (OPEN_A, WAIT, OPEN_SOURCE, ("severity", A), WAIT, use(Setting(PAGER, "rack")), end(A), WAIT, end(SOURCE)),
    ),
    "routes go, then a person takes a page that PagerDuty got in a group": World(
        Setting(PAGER), 20, (OPEN_A, WAIT, use(ALONE), ("acknowledge", A, None), WAIT)
    ),
    "routes go, then an acknowledgement expires of a page that was sent in a group": World(
        Setting(PAGER), 20, (OPEN_A, WAIT, ("acknowledge", A, 0.1), use(ALONE), WAIT, WAIT, end(A), WAIT)
    ),
    "routes lead elsewhere while a page waits in its group": World(
        Setting(PAGER), 20, (OPEN_A, use(Setting(DESK)), WAIT)
    ),
    "a route has the text of matchers of another receiver's route before": World(
        Setting(replace(HOOK, routes=({**BELOW, "receiver": "pager"},))),
        20,
        (OPEN_A, WAIT, use(Setting(replace(HOOK, routes=({**BELOW, "receiver": "desk"},)))), ("hours", 1)),
    ),
    "routes lead a page elsewhere while the route that made its group stays": World(
        Setting(PAGER), 20, (OPEN_A, WAIT, use(Setting(replace(PAGER, routes=({**BELOW, "receiver": "desk"},)))), LONG)
    ),
    "the matchers of a route are written otherwise while a page fires": World(
        Setting(replace(HOOK, routes=({**BELOW, "receiver": "pager"},))),
        20,
        (OPEN_A, WAIT, use(Setting(replace(HOOK, routes=({**REGEX, "receiver": "pager"},)))), LONG, end(A), WAIT),
    ),
    "a receiver is removed, a page ends, and the receiver returns": World(
        ALONE, 20, (OPEN_A, WAIT, use(Setting(removed=("pager",))), end(A), WAIT)
    ),
    "a receiver is removed, the labels of a page change, and the receiver returns": World(
        ALONE, 20, (OPEN_A, WAIT, use(Setting(removed=("desk",))), ("blame", A), WAIT)
    ),
    "a receiver is removed, a person takes its page, and the receiver returns": World(
        ALONE, 20, (OPEN_A, WAIT, use(Setting(removed=("pager",))), ("acknowledge", A, None), WAIT)
    ),
    "a receiver fails, another one is removed that got the notice, and both return": World(
        ALONE, 20, (("away", "hook", "error"), OPEN_A, WAIT, use(Setting(removed=("desk",))), ("back", "hook"), WAIT)
    ),
    "a person takes a page, it is silenced for a while, then its severity falls": World(
        ALONE,
        20,
        (OPEN_A, WAIT, ("acknowledge", A, None), ("silence", f'cause="{A}"', 30), WAIT, ("severity", A), WAIT),
    ),
    "group_by changes while a page fires": World(
        Setting(PAGER), 20, (OPEN_A, WAIT, use(Setting(replace(PAGER, group_by=("rack",)))), WAIT, end(A), WAIT)
    ),
    "the second of two routes to a receiver goes while its group waits, then a restart": World(
        Setting(TWICE), 20, (OPEN_A, SECOND, use(Setting(replace(TWICE, routes=(ALL,)))), WAIT, RESTART, WAIT)
    ),
    "both of two routes to a receiver go while the second group waits, then a restart": World(
        Setting(TWICE), 20, (OPEN_A, SECOND, use(Setting(replace(TWICE, routes=()))), WAIT, RESTART, WAIT)
    ),
    "a person takes a page that one of two groups of a receiver said, then a restart": World(
        Setting(TWICE), 20, (OPEN_A, SECOND, ("acknowledge", A, None), WAIT, RESTART, WAIT)
    ),
    "a receiver takes a page without an answer, is removed, the page ends, and it returns": World(
        ALONE, 20, (LOST, OPEN_A, FEW, end(A), GONE, WAIT, use(ALONE), BACK, WAIT)
    ),
    "a receiver takes a page without an answer, is removed, its labels change, and it returns": World(
        ALONE, 20, (LOST, OPEN_A, FEW, GONE, ("blame", A), WAIT, use(ALONE), BACK, WAIT)
    ),
    "a receiver gets a page, its labels change while it is away, it is removed, the page ends, and it returns": World(
        ALONE,
        20,
        (OPEN_A, WAIT, ("away", "desk", "error"), ("severity", A), FEW, end(A), GONE, WAIT, use(ALONE), BACK, WAIT),
    ),
    "a receiver that is away is removed before it got a page, and returns": World(
        ALONE, 20, (("away", "desk", "error"), OPEN_A, FEW, GONE, WAIT, use(ALONE), BACK, WAIT)
    ),
}
