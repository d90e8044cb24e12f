# A bench's JSON as a record for docs/figures; docs/method.md, section "Figures", tells how it is used.
# Of a series too long for a record, one point in every few is kept, the last one among them, and times to 10 ms.
def thinned($most): . as $all | ((length / $most) | ceil) as $each
  | [$all[range(length - 1; -1; -([$each, 1] | max))]] | reverse | map(.seconds |= (. * 100 | round / 100));
{
  date: $date,
  command: $command,
  machine: $machine,
  output: walk(if type == "object" then
      (if has("curve") then .curve |= thinned(50) else . end)
      | (if has("saved_over_time") then .saved_over_time |= thinned(150) else . end)
      | (if has("frames_over_time") then .frames_over_time |= thinned(5) else . end)
    else . end)
}
