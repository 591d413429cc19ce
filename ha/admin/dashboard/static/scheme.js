// The colours that the reader has chosen with the switch of page.js, before the first paint; otherwise the system's.
try {
  const chosen = localStorage.getItem("halog-scheme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.scheme = chosen;
} catch {
  // The browser stores nothing for this page.
}
