// The components and hooks that the pages are made of.

export { Bytes, Duration, Num, Rate, Time, bytesText, durationText, localText, numText, timeText } from "./ui/format.js"
export { go, link, useQuery } from "./ui/route.js"
export { usePref, setPref, pref } from "./ui/prefs.js"
export { may, useMay, usePoll, useSession } from "./ui/hooks.js"
export {
  Badge, Button, Empty, Busy, Failure, Heading, Icon, Loaded, Notice, Panel, Stat, Tabs, Search, copyText, toast,
} from "./ui/basics.js"
export { Confirm, Dialog } from "./ui/dialogs.js"
export { Field, Form } from "./ui/forms.js"
export { Pager, Table } from "./ui/table.js"
export { Chart, useHistory } from "./ui/chart.js"
export { Json } from "./ui/json.js"
