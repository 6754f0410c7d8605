// What a page does beyond being read: it stays fresh, tells local time, and listens to keys.
// Without this file all screens can still be read.
(function () {
  "use strict";
  const base = document.querySelector('meta[name="rota-base"]').content;
  const keep = {
    get(name) { try { return localStorage.getItem("rota-" + name); } catch { return null; } },
    set(name, value) { try { localStorage.setItem("rota-" + name, value); } catch { /* not kept */ } },
  };
  const $ = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];

  // Times
  function full(date, isLocal) {
    const pad = (n) => String(n).padStart(2, "0");
    if (!isLocal) return date.toISOString().slice(0, 19).replace("T", " ") + " UTC";
    return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ` +
      `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  }
  // As the server tells a length of time: by its two largest units.
  function span(seconds) {
    const parts = [];
    let left = Math.round(seconds);
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
      const count = Math.floor(left / size);
      left %= size;
      if (count) parts.push(`${count} ${unit}`);
      else if (parts.length) break;
    }
    return parts.slice(0, 2).join(" ");
  }
  // The clock is that of the database.
  let skew = 0;
  function setClock() {
    const now = Date.parse($("#main").dataset.now);
    skew = isNaN(now) ? 0 : now - Date.now();
  }
  function fromNow(date) {
    const told = document.body.dataset, away = (Date.now() + skew - date) / 1000;
    if (Math.abs(away) < 1) return told.current;
    return (away < 0 ? told.in : told.ago).replace("{}", span(Math.abs(away)));
  }
  function tellAges() {
    for (const time of all("time[datetime]:not([data-full])")) {
      const date = new Date(time.dateTime);
      const told = isNaN(date) ? "" : fromNow(date);
      if (told && time.textContent !== told) time.textContent = told;
    }
  }
  const isLocal = () => keep.get("zone") !== "utc";
  function tellTimes() {
    const isHere = isLocal();
    for (const time of all("time[datetime]")) {
      const date = new Date(time.dateTime);
      if (isNaN(date)) continue;
      time.title = `${full(date, true)} (${Intl.DateTimeFormat().resolvedOptions().timeZone})\n${full(date, false)}`;
      const told = full(date, isHere);
      if (time.dataset.full === "short") time.textContent = told.slice(5, 16) + told.slice(19);
      else if (time.dataset.full !== undefined) time.textContent = told;
    }
    for (const title of all("title[data-at]")) {
      const date = new Date(title.dataset.at), rest = title.textContent.indexOf(": ");
      const zone = isHere ? full(date, true).slice(0, 16) : full(date, false).slice(0, 16) + " UTC";
      title.textContent = zone + title.textContent.slice(title.dataset.cut ?? rest);
      title.dataset.cut = zone.length;
    }
    const button = $('[data-do="zone"]');
    if (button) button.textContent = isHere ? "local" : "UTC";
    tellAges();
  }

  // Fresh pages
  const sign = $("#live");
  // The server tells of a change once a minute at least, if there is one or not.
  const LONGEST = 60000, SILENCE = 90000;
  let heardAt = 0;
  let source = null, isStale = false, isLoading = false, pause = 0, again = 0;
  function isBusy() {
    const at = document.activeElement;
    return document.hidden || $("dialog[open]") || $("main input:checked[name=id]") ||
      $(".chart[data-held]") ||
      $("main details.filters[open]") || $("main details.act[open]") ||
      (at && at.closest("main") && /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName)) ||
      String(getSelection()).length > 0;
  }
  async function refresh() {
    if (isLoading) return;
    if (isBusy()) { isStale = true; show(); return; }
    isLoading = true; isStale = false; show();
    try {
      await htmx.ajax("GET", location.href, {
        target: "#main", select: "#main", swap: "outerMorph", headers: { "Rota-Live": "1" },
      });
    } catch { isStale = true; }
    isLoading = false;
    show();
  }
  // Only now, since keys are pressed and boxes ticked also while the answer is on its way; and
  // what is kept is given back before the next of them.
  document.addEventListener("htmx:before:swap", (event) => {
    // What a proxy answers for us, as without a server or a login, takes no place on the page.
    if (!event.detail.ctx.text.includes('name="rota-base"')) {
      event.preventDefault();
      listenLater();
      return;
    }
    if (!event.detail.ctx.request.headers["Rota-Live"]) return;
    if (isBusy()) { isStale = true; event.preventDefault(); return; }
    const wasOpen = folds();
    const row = keyOf(rows()[at()]);
    const hadFocus = row && document.activeElement?.closest("main tr.at");
    queueMicrotask(() => freshen(wasOpen, row, hadFocus));
  });
  function freshen(wasOpen, row, hadFocus) {
    for (const [key, { fold }] of folds()) {
      if (wasOpen.has(key)) fold.open = wasOpen.get(key).isOpen;
    }
    // The mark stays with its row, wherever that is now.
    const again = row ? rows().findIndex((other) => keyOf(other) === row) : -1;
    rows().forEach((other) => other.classList.remove("at"));
    if (again >= 0) {
      mark(again, false);
      if (hadFocus) rows()[again].querySelector("a")?.focus({ preventScroll: true });
    }
    counted();
    setClock();
    tellTimes();
    document.dispatchEvent(new Event("rota:fresh"));
    sign.classList.remove("beat");
    void sign.offsetWidth;
    sign.classList.add("beat");
  }
  // Each part that folds, by its title and which of that title it is.
  function folds() {
    const found = new Map(), times = {};
    for (const fold of all("main details")) {
      const title = fold.querySelector("summary")?.textContent ?? "";
      times[title] = (times[title] ?? 0) + 1;
      found.set(`${title} ${times[title]}`, { fold, isOpen: fold.open });
    }
    return found;
  }
  function show() {
    const isOn = source && source.readyState === 1;
    sign.hidden = false;
    sign.classList.toggle("off", !isOn || isStale);
    sign.textContent = isOn && !isStale ? sign.dataset.live : sign.dataset.paused;
  }
  function listen() {
    if (document.hidden || source || !("EventSource" in window)) return;
    clearTimeout(again);
    source = new EventSource(base + "/events");
    heardAt = Date.now();
    source.addEventListener("change", () => { heardAt = Date.now(); refresh(); });
    source.onopen = () => { pause = 0; show(); };
    // A lost connection is tried again, but not what a proxy has answered in its place.
    source.onerror = () => { if (source?.readyState === EventSource.CLOSED) listenLater(); show(); };
  }
  function listenLater() {
    deafen();
    clearTimeout(again);
    pause = Math.min(2 * pause || 2000, LONGEST);
    again = setTimeout(listen, pause);
  }
  function deafen() { if (source) { source.close(); source = null; show(); } }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) deafen();
    else { listen(); refresh(); }
  });
  addEventListener("pagehide", deafen);
  setInterval(() => {
    // Nothing comes through a proxy that keeps what it gets until it has the whole of it.
    const isSilent = source && Date.now() - heardAt > SILENCE;
    if (isSilent) listenLater();
    if (isSilent || (isStale && !isBusy())) refresh();
  }, 1000);

  // Rows and keys
  const rows = () => all("main table.rows tbody tr");
  const keyOf = (row) => row && (row.querySelector("a")?.getAttribute("href") ?? row.textContent);
  const at = () => rows().findIndex((row) => row.classList.contains("at"));
  function mark(place, scrolls = true) {
    const found = rows();
    if (!found.length) return;
    const row = found[Math.min(Math.max(place, 0), found.length - 1)];
    found.forEach((other) => other.classList.toggle("at", other === row));
    if (scrolls) {
      row.scrollIntoView({ block: "nearest" });
      const link = row.querySelector("a");
      if (link) link.focus({ preventScroll: true });
    }
  }
  const acts = {
    theme() {
      const root = document.documentElement;
      const isDark = root.dataset.theme ? root.dataset.theme === "dark"
        : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = isDark ? "light" : "dark";
      keep.set("theme", root.dataset.theme);
      document.dispatchEvent(new Event("rota:theme"));
    },
    zone() {
      keep.set("zone", isLocal() ? "utc" : "local");
      tellTimes();
      document.dispatchEvent(new Event("rota:zone"));
    },
    help() { $("#help").showModal(); },
    copy(button) {
      const text = button.parentElement.querySelector("code").textContent;
      const was = button.textContent;
      navigator.clipboard.writeText(text).then(() => {
        button.textContent = button.dataset.done;
        setTimeout(() => { button.textContent = was; }, 1500);
      });
    },
    all(box) {
      for (const other of all('main input[name="id"]')) other.checked = box.checked;
      counted();
    },
  };
  function counted() {
    const number = all('main input[name="id"]:checked').length;
    const bar = $("#selected");
    if (!bar) return;
    bar.querySelector("output").textContent = number;
  }
  document.addEventListener("click", (event) => {
    const found = event.target.closest("[data-do]");
    if (found) acts[found.dataset.do](found);
  });
  document.addEventListener("change", (event) => {
    if (event.target.name === "id") counted();
    if (event.target.dataset.sends !== undefined) event.target.form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input:not([type=checkbox]), textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if ($("dialog[open]")) return;
    const links = all(".bar nav a");
    if (event.key === "/") { $("#find").focus(); event.preventDefault(); }
    else if (event.key === "j") mark(at() + 1);
    else if (event.key === "k") mark(at() < 0 ? 0 : at() - 1);
    else if (event.key === "x") {
      const box = rows()[at()]?.querySelector('input[name="id"]');
      if (box) { box.checked = !box.checked; counted(); }
    }
    else if (event.key === "t") acts.theme();
    else if (event.key === "u") acts.zone();
    else if (event.key === "?") acts.help();
    else if (event.key >= "1" && event.key <= String(links.length)) links[event.key - 1].click();
  });

  // A second click would act again.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method !== "post") return;
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "1";
  });
  addEventListener("pageshow", () => {
    for (const form of all("form[data-sent]")) delete form.dataset.sent;
  });
  const goesOn = $("form[data-goes-on]");
  if (goesOn) setTimeout(() => goesOn.requestSubmit(), 100);
  counted();
  setClock();
  tellTimes();
  setInterval(tellAges, 1000);
  if (!$("#main [data-still]")) listen();
  window.rota = { span, isLocal };
})();
