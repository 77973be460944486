"""Chats: one Slack message per incident, edited as it goes on; Adaptive Cards for Teams; everything else by apprise.

Texts of alerts come from the fleet (names of jobs): they are escaped, and never choose where a message goes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.receivers import Apprise, ReceiverConfig, Slack, Teams
from pipeline.incidents.changes import REPEATED
from pipeline.model.errors import ConfigError
from pipeline.notify.delivery import (
    Answer,
    Call,
    PostResult,
    Request,
    Target,
    check_networks,
    check_receiver,
    classify_answer,
    refuse_unexpected,
)
from pipeline.notify.receivers import (
    QUIET,
    Endpoint,
    Message,
    cut,
    describe_change,
    encode_json,
    make_lines,
    make_template,
    make_title,
    name_event,
    read_secret,
    render_text,
)

MAX_SECTION, MAX_TITLE = 3000, 150
"""Characters of a section and of a title: Slack's limits. A message has two sections and a line, so it stays below the
8,000 that we allow ourselves: Slack refuses about 13,200."""
MAX_CARD_BYTES = 28_000
"""Longest card (bytes): Teams refuses more than 28 kB, and does so at every attempt."""
COLORS = {
    "critical": "#D55E00",
    "warning": "#E69F00",
    "info": "#56B4E9",
    "resolved": "#009E73",
    "acknowledged": "#0072B2",
    "silenced": "#999999",
}
"""Okabe and Ito's colours, which colour-blind people can distinguish; the text has the same information."""
CARD_STYLES = {"critical": "attention", "warning": "warning", "info": "accent", "resolved": "good"}
GONE = frozenset(
    {"message_not_found", "cant_update_message", "thread_not_found", "edit_window_closed"}
    | {"channel_not_found", "is_inactive", "is_archived", "not_in_channel"}
)
"""Slack's errors for a message that cannot be edited any more, or whose channel was deleted or archived or is of
another workspace: then a new one is posted to the configured channel."""
LIMITED = frozenset({"ratelimited", "rate_limited"})
"""Slack's errors for a limit of the rate, which comes with status 429; some methods say it with 200."""
ALIVE = frozenset({"no_text", "invalid_payload", "missing_text_or_fallback_or_attachments", "missing_text"})
"""Answers of a working Slack webhook to a message without text, which is not shown to anybody."""
_CODE = re.compile(r"[a-z_]{1,60}")


def choose_color(message: Message) -> str:
    """Returns the name of the state of a message: silenced, resolved, acknowledged, or the severity."""
    if message.event == "silenced":
        return "silenced"
    if message.is_resolved:
        return "resolved"
    incident = message.change.get("incident")
    if isinstance(incident, Mapping):
        is_owned = incident.get("state") == "acknowledged"
    else:  # a group of several; one of an older version said an acknowledgement once it was of all
        is_owned = bool(message.change.get("acknowledged", message.event == "acknowledged"))
    return "acknowledged" if is_owned else str(message.main["labels"].get("severity", "info"))


def make_headline(message: Message, title: str) -> str:
    """Returns the title behind its state: `RESOLVED: ...`, `critical: ...`."""
    state, news = choose_color(message), message.change.get("news")
    if state in CARD_STYLES and not message.is_resolved and isinstance(news, Mapping):
        state = str(news["severity"])  # the title begins with this alert; the colour is that of the worst
    return f"{state.upper() if state in ('resolved', 'acknowledged', 'silenced') else state}: {title}"


class ChatEndpoint(Endpoint):
    """A receiver that shows a title and a text, each from a template if there is one."""

    def __init__(self, receiver: Slack | Teams | Apprise) -> None:
        super().__init__(receiver)
        self._title = make_template(receiver.title, receiver.section, receiver.name, "title")
        self._text = make_template(receiver.text, receiver.section, receiver.name, "text")

    def make_texts(self, message: Message) -> tuple[str, str]:
        """Returns title and text, neither escaped."""
        title = cut(make_headline(message, render_text(self._title, message, make_title(message))), MAX_TITLE)
        return title, cut(render_text(self._text, message, "\n".join(make_lines(message))), MAX_SECTION)


class SlackEndpoint(ChatEndpoint):
    """A channel of Slack. With a token a message is edited; an incoming webhook can only post new ones."""

    def __init__(self, receiver: Slack) -> None:
        super().__init__(receiver)
        self._receiver = receiver
        self.edits = receiver.token_file is not None
        self._edited = ""  # the message whose edit was accepted, and whose reply was limited

    def reports(self, kind: str) -> bool:
        """Reports every change but new titles; an incoming webhook, which cannot edit, only acknowledgements."""
        return kind not in QUIET if self._receiver.token_file else kind == "acknowledged"

    def check_settings(self) -> None:
        """Raises ConfigError unless there is a token with a channel, or the URL of an incoming webhook."""
        one = self._receiver
        if (one.token_file is None) == (one.url_file is None) or bool(one.channel) != (one.token_file is not None):
            raise ConfigError(f"[[{one.section}]] {one.name}: expected token_file and channel, or url_file")
        check_networks(one)
        if one.url_file is None:
            check_receiver(self._target("chat.postMessage"))

    def check(self) -> None:
        """Raises ConfigError for wrong keys, an unreadable secret, or a bad URL in its file."""
        super().check()
        check_receiver(self._target("chat.postMessage"))
        if self._receiver.token_file is not None:
            self._headers()

    def send(self, message: Message, call: Call) -> PostResult:
        """Posts the message, or edits the one of its thread and adds the change below it."""
        try:
            shown = make_slack_message(message, *self.make_texts(message))
            if self._receiver.token_file is None:
                return _classify_webhook(self._call("", shown, call))
            if not message.reference:
                return self._post(message, shown, call)
            channel, _, time = message.reference.partition(":")
            if message.id == self._edited:  # else a limit of one request at a time would let it through never
                return self._reply(message, channel, time, call)
            edited = _classify_slack(self._call("chat.update", {**shown, "channel": channel, "ts": time}, call))
            if edited.text.removeprefix("Slack: ") in GONE:
                return self._post(message, shown, call)
            if edited.outcome != "delivered":
                return edited
            if message.event == "updated" and not describe_change(message):
                return edited  # the message above shows it; a reply would add no word
            return self._reply(message, channel, time, call)
        except ConfigError as error:  # a secret that was readable at the start
            return PostResult("retry", str(error))

    def probe(self, call: Call) -> PostResult | None:
        """Runs auth.test; sends an incoming webhook a message without text, which it refuses in a known way."""
        try:
            if self._receiver.token_file is not None:
                return _classify_slack(self._call("auth.test", {}, call))
            answer = self._call("", {}, call)
        except ConfigError as error:
            return PostResult("retry", str(error))
        if answer.status == 400 and answer.body.decode(errors="replace").strip() in ALIVE:
            return PostResult("delivered", "HTTP 400 to an empty message, as expected")
        if answer.status == 400 or 200 <= answer.status < 300:
            return refuse_unexpected(answer, "400 and a word of Slack for an empty message")
        return classify_answer(answer)

    def _post(self, message: Message, shown: Mapping[str, Any], call: Call) -> PostResult:
        return _classify_slack(self._call("chat.postMessage", {**shown, "channel": self._receiver.channel}, call), True)

    def _reply(self, message: Message, channel: str, time: str, call: Call) -> PostResult:
        """Adds what changed to the thread of the message."""
        lines, title = describe_change(message), make_title(message)
        if message.change.get("news") or not lines:  # else each line names its incident, or the thread is of one
            lines.insert(0, f"{_name_reply(message)}: {title}")
        elif _is_news(message):
            lines[-1] += f" ({title})"
        text = escape_slack(cut("\n".join(lines), MAX_SECTION))
        reply: dict[str, Any] = {"channel": channel, "thread_ts": time, "text": text, "metadata": _metadata(message)}
        if _is_news(message):  # an edit and a reply alone notify no one
            reply["reply_broadcast"] = True
        result = _classify_slack(self._call("chat.postMessage", reply, call))
        self._edited = message.id if result.limited else ""
        return dataclasses.replace(result, reference=f"{channel}:{time}")

    def _call(self, method: str, body: Mapping[str, Any], call: Call) -> Answer:
        data = json.dumps(body, separators=(",", ":")).encode()
        return call(Request(self._target(method), data, self._headers(), most=65_536))

    def _headers(self) -> dict[str, str]:
        one = self._receiver
        if one.token_file is None:
            return {}
        token = read_secret(one.section, one.name, "token_file", one.token_file)
        return {"Content-Type": "application/json; charset=utf-8", "Authorization": f"Bearer {token}"}

    def _target(self, method: str) -> Target:
        one = self._receiver
        if one.url_file is not None:
            url = read_secret(one.section, one.name, "url_file", one.url_file)
            return Target(one.section, one.name, url, one.allow_http, one.allow_private, "url_file")
        url = f"{one.url.rstrip('/')}/{method}"
        return Target(one.section, one.name, url, one.allow_http, one.allow_private)


def _find_reason(message: Message) -> str:
    """Returns why a group sends a message; empty for one incident, of which the event says it."""
    return str(message.body.get("notification_reason", "")) if "incidents" in message.change else ""


def _name_reply(message: Message) -> str:
    """Returns what happened, before the title: the reason of a group, else the event."""
    reason = _find_reason(message) if message.event == "opened" else ""
    return reason.capitalize() or name_event(message)


def _is_news(message: Message) -> bool:
    """Returns whether a message must notify people although its thread fires: it pages again, or for an alert that
    they do not know."""
    if message.event in REPEATED:
        return True
    if message.kind != "firing" or message.event not in ("opened", "reopened", "unsilenced", "severity_raised"):
        return False
    return bool(message.change.get("news")) or _find_reason(message) in ("", "first notification", "new alerts added")


def make_slack_message(message: Message, title: str, text: str) -> dict[str, Any]:
    """Returns text and one attachment, whose colour is the state; at most 8,000 characters."""
    link = str(message.main.get("generatorURL", ""))
    shown = escape_slack(title)
    head = f"*<{link}|{shown.replace('|', '¦')}>*" if re.match(r"https?://[^\s<>|]+$", link) else f"*{shown}*"
    blocks: list[dict[str, Any]] = [_section(head)]
    if text:
        blocks.append(_section(cut(escape_slack(text), MAX_SECTION)))
    labels = message.main["labels"]
    facts = [f"{name}: {labels[name]}" for name in ("site", "cause", "detector", "incident") if labels.get(name)]
    blocks.append(
        {"type": "context", "elements": [{"type": "mrkdwn", "text": escape_slack(cut(" · ".join(facts), 1000))}]}
    )
    color = COLORS.get(choose_color(message), COLORS["info"])
    return {
        "text": cut(shown, MAX_SECTION),
        "attachments": [{"color": color, "fallback": cut(shown, MAX_TITLE), "blocks": blocks}],
        "unfurl_links": False,
        "metadata": _metadata(message),
    }


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def _metadata(message: Message) -> dict[str, Any]:
    """Returns the idempotency key, by which a message that was sent twice is recognized."""
    return {"event_type": "fleetpulse", "event_payload": {"key": message.id, "thread": message.thread}}


def escape_slack(text: str) -> str:
    """Returns text that Slack shows as it is: no mentions, links or formatting of names from the fleet."""
    plain = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[*_~`]", lambda found: "\u200b" + found[0], plain)


def _classify_webhook(answer: Answer) -> PostResult:
    """Returns the result of a message to an incoming webhook, which answers the word `ok`."""
    result = classify_answer(answer)
    if result.outcome == "delivered" and answer.body.strip() != b"ok":
        return refuse_unexpected(answer, "the word ok of a webhook of Slack")
    return result


def _classify_slack(answer: Answer, is_new: bool = False) -> PostResult:
    """Returns the result of a method of the Web API, which answers 200 also if it failed."""
    result = classify_answer(answer)
    if result.outcome != "delivered":
        return result
    try:
        body = json.loads(answer.body)
        if body["ok"] is True:
            reference = f"{body['channel']}:{body['ts']}" if is_new else ""
            return PostResult("delivered", "HTTP 200, ok", reference=reference)
        code = str(body.get("error", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return refuse_unexpected(answer, "the JSON of Slack with ok")
    text = f"Slack: {code if _CODE.fullmatch(code) else 'unknown error'}"
    return PostResult("retry", text, answer.retry_after_s, limited=code in LIMITED)


class TeamsEndpoint(ChatEndpoint):
    """A workflow of Teams, which posts a card; a card cannot be edited."""

    def __init__(self, receiver: Teams) -> None:
        super().__init__(receiver)
        self._receiver = receiver

    def reports(self, kind: str) -> bool:
        """Reports acknowledgements, escalations and new owners, each as a separate card."""
        return kind in ("acknowledged", "escalated", "assigned")

    def check_settings(self) -> None:
        """Raises ConfigError for networks that are none."""
        check_networks(self._receiver)

    def check(self) -> None:
        """Raises ConfigError on an unreadable or bad URL."""
        super().check()
        check_receiver(self._target())

    def send(self, message: Message, call: Call) -> PostResult:
        """Posts a card."""
        try:
            title, text = self.make_texts(message)
            for most in (MAX_SECTION, MAX_SECTION // 4, 0):
                body = encode_json(make_teams_card(message, title, cut(text, most) if most else ""))
                if len(body) <= MAX_CARD_BYTES:
                    break
            answer = call(Request(self._target(), body))
        except ConfigError as error:  # a secret that was readable at the start
            return PostResult("retry", str(error))
        result = classify_answer(answer)
        if result.outcome == "delivered" and answer.body.lstrip()[:1] == b"<":  # a workflow may answer any other text
            return refuse_unexpected(answer, "202 of a workflow, which sends no page")
        return result

    def _target(self) -> Target:
        one = self._receiver
        url = read_secret(one.section, one.name, "url_file", one.url_file)
        return Target(one.section, one.name, url, one.allow_http, one.allow_private, "url_file")


def make_teams_card(message: Message, title: str, text: str) -> dict[str, Any]:
    """Returns the envelope of a workflow around one Adaptive Card."""
    labels, link = message.main["labels"], str(message.main.get("generatorURL", ""))
    style = CARD_STYLES.get(choose_color(message), "accent")
    facts = [
        {"title": name.capitalize(), "value": escape_markdown(cut(str(labels[name]), 200))}
        for name in ("severity", "site", "cause", "detector", "incident")
        if labels.get(name)
    ]
    heading = {"type": "TextBlock", "text": escape_markdown(title), "weight": "Bolder", "size": "Medium", "wrap": True}
    body: list[dict[str, Any]] = [{"type": "Container", "style": style, "bleed": True, "items": [heading]}]
    body += [{"type": "TextBlock", "text": escape_markdown(line), "wrap": True} for line in text.splitlines()[:20]]
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "fallbackText": title,
        "body": [*body, {"type": "FactSet", "facts": facts}],
    }
    if re.match(r"https?://\S{1,2000}$", link):
        card["actions"] = [{"type": "Action.OpenUrl", "title": "Open incident", "url": link}]
    content = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [content]}


def escape_markdown(text: str) -> str:
    """Returns text that a card shows as it is."""
    return re.sub(r"([\\`*_\[\]()<>#|~])", r"\\\1", text)


class AppriseEndpoint(ChatEndpoint):
    """Services of apprise. It reports no answer, follows the services' own rules of addresses, and resolves nothing."""

    def __init__(self, receiver: Apprise) -> None:
        super().__init__(receiver)
        self._receiver = receiver

    def check_settings(self) -> None:
        """Raises ConfigError if apprise is not installed."""
        if importlib.util.find_spec("apprise") is None:
            where = f"[[{self._receiver.section}]] {self.name}"
            raise ConfigError(f"{where}: apprise is not installed; run: pip install 'fleetpulse[apprise]'")

    def check(self) -> None:
        """Raises ConfigError if apprise is not installed, or knows none of the URLs."""
        super().check()
        self._open()

    def send(self, message: Message, call: Call) -> PostResult:
        """Notifies all services; if one fails, all are notified again."""
        title, text = self.make_texts(message)
        kinds = {"critical": "failure", "warning": "warning", "resolved": "success"}
        kind = kinds.get(choose_color(message), "info")
        link = str(message.main.get("generatorURL", ""))
        try:
            sent = self._open().notify(body=f"{text or title}\n{link}".strip(), title=title, notify_type=kind)
        except (ConfigError, TypeError, OSError) as error:
            return PostResult("retry", str(error) if isinstance(error, ConfigError) else type(error).__name__)
        return PostResult("delivered", "apprise: sent") if sent else PostResult("retry", "apprise: not sent")

    def _open(self) -> Any:
        import apprise  # an extra

        one = self._receiver
        opened = apprise.Apprise()
        for number, url in enumerate(read_secret(one.section, one.name, "urls_file", one.urls_file).splitlines(), 1):
            if url.strip() and not url.startswith("#") and not opened.add(url.strip()):
                raise ConfigError(f"[[{one.section}]] {one.name}: urls_file: line {number}: unknown to apprise")
        if not len(opened):
            raise ConfigError(f"[[{one.section}]] {one.name}: urls_file: has no URL")
        return opened


def build(receiver: ReceiverConfig) -> Sequence[Endpoint]:
    """Returns the endpoint of a chat."""
    if isinstance(receiver, Slack):
        return [SlackEndpoint(receiver)]
    if isinstance(receiver, Teams):
        return [TeamsEndpoint(receiver)]
    assert isinstance(receiver, Apprise)
    return [AppriseEndpoint(receiver)]
