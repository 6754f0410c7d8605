// Before the first line is drawn: the theme that was chosen, and that there is a script.
(function () {
  const root = document.documentElement;
  root.classList.add("has-js");
  try {
    const theme = localStorage.getItem("rota-theme");
    if (theme) root.dataset.theme = theme;
  } catch { /* a browser that keeps nothing */ }
})();
