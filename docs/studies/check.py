#!/usr/bin/env python3
"""Recomputes every verdict of results of `pagefold study` from their raw samples.

It shares no code with the crate `study`: it takes the rule from its words, and quantiles of Student's distribution by
integrating the density. Python's standard library alone. Run by `./x studies --check`.
"""
import json
import math
import re
import sys

LEAST_N = 3
RULE = re.compile(
    r"(?P<metric>\S+) in (?P<arm>\S+)(?: over (?P<over>\S+?))?(?: minus (?P<minus>\S+?))?(?: at (?P<x>.+))?"
    r": (?:(?P<side>above|below) (?P<bound>\S+)|from (?P<low>\S+) to (?P<high>\S+))$"
)


def student(t, degrees):
    """Part of Student's distribution between -t and t, by Simpson's rule."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    steps = 4000
    width = t / steps
    total = 0.0
    for step in range(steps + 1):
        weight = 1 if step in (0, steps) else 4 if step % 2 else 2
        total += weight * (1 + (step * width) ** 2 / degrees) ** (-(degrees + 1) / 2)
    return 2 * scale * total * width / 3


def quantile(degrees, known={}):
    """The quantile for a two-sided interval of 95%, by bisection."""
    if degrees not in known:
        low, high = 1.0, 20.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if student(middle, degrees) < 0.95 else (low, middle)
        known[degrees] = high
    return known[degrees]


def samples(run):
    """{(metric, arm, x): {repetition: figure}} of a run."""
    table = {}
    for record in run["measured"]:
        reps = record.get("reps") or range(len(record["samples"]))
        table[record["metric"], record["arm"], record["x"]] = dict(zip(reps, record["samples"]))
    return table


def by_day(runs):
    """The mean of each figure of a day, as one repetition."""
    days = {}
    for run in runs:
        for key, figures in samples(run).items():
            days.setdefault(run["date"][:10], {}).setdefault(key, []).extend(figures.values())
    table = {}
    for number, day in enumerate(sorted(days)):
        for key, figures in days[day].items():
            table.setdefault(key, {})[number] = sum(figures) / len(figures)
    return table


def figures(table, rule):
    """The rule's figure of each repetition."""
    own = table.get((rule["metric"], rule["arm"], rule["x"]), {})
    other = rule["over"] or rule["minus"]
    base = table.get((rule["metric"], other, rule["x"]), {}) if other else None
    found = []
    for rep in sorted(own):
        if base is None:
            found.append(own[rep])
        elif rep in base and rule["minus"]:
            found.append(own[rep] - base[rep])
        elif rep in base and base[rep] != 0:
            found.append(own[rep] / base[rep])
    return found


def judge(values, rule):
    """Verdict, value and interval, from the figures alone."""
    if rule["side"]:
        bounds = [float(rule["bound"])]
    else:
        bounds = [float(rule["low"]), float(rule["high"])]
    is_ratio = rule["over"] and all(v > 0 for v in values) and all(b > 0 for b in bounds)
    to, back = (math.log, math.exp) if is_ratio else (float, float)
    scaled = [to(v) for v in values]
    bounds = [to(b) for b in bounds]
    if not scaled:
        return "undecided", None, None
    mean = math.fsum(scaled) / len(scaled)
    if len(scaled) < 2:
        return "undecided", back(mean), None
    variance = math.fsum((v - mean) ** 2 for v in scaled) / (len(scaled) - 1)
    half = 0.0 if variance == 0 else quantile(len(scaled) - 1) * math.sqrt(variance / len(scaled))
    low, high = mean - half, mean + half
    verdict = "undecided"
    if len(scaled) >= LEAST_N:
        if rule["side"] == "above":
            verdict = "holds" if low > bounds[0] else "fails" if high < bounds[0] else verdict
        elif rule["side"] == "below":
            verdict = "holds" if high < bounds[0] else "fails" if low > bounds[0] else verdict
        elif low >= bounds[0] and high <= bounds[1]:
            verdict = "holds"
        elif high < bounds[0] or low > bounds[1]:
            verdict = "fails"
    return verdict, back(mean), [back(low), back(high)]


def differ(a, b):
    """Whether two figures differ by more than rounded quantiles do."""
    if a is None or b is None:
        return a is not b
    return abs(a - b) > 2e-3 * max(abs(a), abs(b), 1e-9)


# Reasons other than the interval for which a prediction stays undecided: an arm that was not run, or whose merger or load did nothing, and a
# figure that is only a bound. They make a verdict weaker, and never stronger.
WEAKER = ("was not run", "nothing was merged", "the load did not run", "bound of what is asked")


def check(result):
    """What is wrong with the verdicts of a result."""
    wrong = []
    runs = [result] + result.get("earlier", [])
    for verdict in result["verdicts"]:
        rule = RULE.match(verdict["rule"])
        if not rule:
            wrong.append(f"{verdict['prediction']}: no such rule: {verdict['rule']}")
            continue
        rule = rule.groupdict()
        run = next((r for r in runs if r.get("date") == verdict.get("run")), result)
        table = by_day(runs) if result["id"] == "kloster-t8.3" else samples(run)
        found, value, interval = judge(figures(table, rule), rule)
        is_weaker = verdict["verdict"] == "undecided" and any(w in (verdict["why"] or "") for w in WEAKER)
        if found != verdict["verdict"] and not is_weaker:
            wrong.append(f"{verdict['prediction']}: {verdict['verdict']}, and by the samples {found}")
        ends = zip(interval or [], verdict["interval"] or [])
        span = abs(interval[1] - interval[0]) if interval else 0
        if differ(value, verdict["value"]) or any(abs(a - b) > 2e-3 * max(abs(a), abs(b), span) for a, b in ends):
            wrong.append(f"{verdict['prediction']}: {verdict['value']} {verdict['interval']}, and by the samples {value} {interval}")
    return wrong


def main():
    count = faults = 0
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            for result in json.load(file):
                count += len(result["verdicts"])
                for fault in check(result):
                    faults += 1
                    print(f"{result['id']}: {fault}")
    print(f"{count} verdicts recomputed, {faults} of them differently")
    sys.exit(1 if faults else 0)


main()
