// The browser counts the age, so that the stamp also ages if the server stops. Statements about the present
// (`present_statement` of markup.py) then change to "Unknown since".
const AMBER_ROUNDS = 3;
const BEHIND_SECONDS = 120; // chosen: frames wait 30 s for late rows, so 45 s behind is usual
const OLD_SECONDS = 60; // a node without data for longer is silent (pipeline/api/fleet.py); here all nodes are
const PAUSED = "0"; // as in the address
const PAUSED_SECONDS = 60; // chosen: a paused page says for as long what it showed

function words(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s >= 86400) return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`; // as `age` of words.py
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
}

export default function (component) {
  const { parentElement, data, setTriggerValue } = component;
  const stamp = parentElement.querySelector(".stamp");
  const what = parentElement.querySelector(".what");
  const received = performance.now();
  const paused = data.live === PAUSED;

  for (const button of parentElement.querySelectorAll(".rates button")) {
    button.setAttribute("aria-pressed", button.dataset.live === data.live);
    button.onclick = () => { if (button.dataset.live !== data.live) setTriggerValue("live", button.dataset.live); };
  }

  function draw() {
    const since = (performance.now() - received) / 1000;
    const age = data.age + since;
    const late = data.answered + since > AMBER_ROUNDS * data.interval || age > OLD_SECONDS;
    const behind = data.behind !== null && data.behind > BEHIND_SECONDS;
    const doubt = data.unready || late || behind;
    const tone = data.fault ? "bad" : doubt ? "late" : paused ? "paused" : "fine";
    const parts = [data.clock ? `Data as of ${data.clock} (${words(age)} ago)` : "No data yet"];
    if (data.behind !== null) parts.push(`analysis lag ${words(data.behind)}`);
    if (data.fault) parts.unshift(data.fault);
    else if (paused) parts.unshift("Paused");
    const silent = data.answered + since > (paused ? PAUSED_SECONDS : AMBER_ROUNDS * data.interval);
    document.documentElement.toggleAttribute("data-fleetpulse-unknown", silent);
    if (silent) for (const place of document.querySelectorAll(".fp-since")) place.textContent = data.answered_at;
    stamp.className = `stamp ${tone}`;
    what.textContent = parts.join(" · ");
  }

  // a refresh calls this again without the clean-up of the previous call: stop its timer
  clearInterval(stamp.fleetpulseTimer);
  draw();
  stamp.fleetpulseTimer = setInterval(draw, 1000);
  return () => clearInterval(stamp.fleetpulseTimer);
}
