// The pages of the console, in the order of the navigation. A page is loaded when it is opened: its module is
// pages/NAME.js, and its default export is {Page}. `group` sets lines between pages, `key` is the letter after "g",
// and `gate` marks pages that are there when the gate is on.

export const PAGES = [
  { name: "overview", title: "Overview", key: "o", group: "bus", routes: ["/"] },
  { name: "topics", title: "Topics", key: "t", group: "bus", routes: ["/topics", "/topics/:name"] },
  { name: "browse", title: "Browse", key: "b", group: "bus", routes: ["/browse", "/browse/:topic"] },
  { name: "groups", title: "Groups", key: "g", group: "bus", routes: ["/groups", "/groups/:topic/:group"] },
  { name: "dead-letters", title: "Dead letters", key: "d", group: "bus", routes: ["/dead-letters", "/dead-letters/:topic"] },
  { name: "state", title: "State", key: "s", group: "bus", routes: ["/state"] },
  { name: "pipelines", title: "Pipelines", key: "p", group: "bus", routes: ["/pipelines"] },
  { name: "connections", title: "Connections", key: "c", group: "server", routes: ["/connections"] },
  { name: "access", title: "Access", key: "a", group: "server", routes: ["/access", "/access/:name"] },
  { name: "audit", title: "Audit", key: "u", group: "server", routes: ["/audit"] },
]
