// Applies the color scheme chosen with the switch of page.js before the first paint; by default the system's applies.
try {
  const chosen = localStorage.getItem("halog-scheme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.scheme = chosen;
} catch {
  // The browser allows no storage for this page.
}
