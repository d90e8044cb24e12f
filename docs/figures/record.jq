# A bench's JSON as a record for docs/figures; docs/method.md, section "Figures", tells how it is used.
# Of each curve every fourth point is kept, the last one among them: files stay small.
{
  date: $date,
  command: $command,
  machine: $machine,
  output: walk(if type == "object" and has("curve") then .curve |= ([.[range(length - 1; -1; -4)]] | reverse) else . end)
}
