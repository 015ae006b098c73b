"""A comparison as Markdown: one row for each problem and pass, fast and slow gates side by side."""

PASSES = {"forward": "forward", "both": "forward and backward"}
EMPTY = "-"


def markdown(report):
    machine, settings, versions = report["machine"], report["settings"], report["versions"]
    gpus = " + ".join(f"{machine['gpus'].count(name)} x {name}" for name in sorted(set(machine["gpus"])))
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    gates = [name for name in ("fast", "slow") if any(row["gates"] == name for row in report["rows"])]
    head = ["op", "PEs", "heads", "tokens", "pass"]
    for name in gates:
        head += [f"{name}: deltalink ms", "FLA ms", "FLA / deltalink"]
    head += ["deltalink MiB", "FLA MiB"]
    lines = [
        "# deltalink beside flash-linear-attention",
        "",
        f"{report['date']}, commit {report['commit']}, {gpus}, driver {machine['driver']}, {machine.get('cpu', 'CPU unknown')}; "
        f"{named or 'no versions'}.",
        f"{settings['dtype']}, K = V = {settings['dim']}; medians of {settings['repeats']} (tenth at each end), of each the PE or "
        "rank that took longest; tokens are of each.",
        "",
        "| " + " | ".join(head) + " |",
        "|---|--:|--:|--:|---|" + "--:|" * (len(head) - 5),
    ]
    for key, rows in by_problem(report["rows"]).items():
        op, pes, heads, tokens, what = key
        cells = [op, pes, heads, tokens, PASSES[what]]
        for name in gates:
            row = rows.get(name)
            cells += [time(row["deltalink"]), time(row["fla"]), ratio(row)] if row else [EMPTY] * 3
        cells += [memory(rows, "deltalink"), memory(rows, "fla")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    refusals = sorted({row["fla"]["refused"] for row in report["rows"] if "refused" in row["fla"]})
    lines += [""] + [f"FLA refused: {' '.join(refusal.split())}" for refusal in refusals]
    lines += [f"Failed: {failure}" for failure in report["failures"]]
    return "\n".join(lines).rstrip() + "\n"


def by_problem(rows):
    """Rows of each problem and pass by their gates, in the order in which they were measured."""
    problems = {}
    for row in rows:
        key = tuple(row[name] for name in ("op", "pes", "heads", "tokens", "pass"))
        problems.setdefault(key, {})[row["gates"]] = row
    return problems


def time(side):
    if "time_us" not in side:
        return "refused" if "refused" in side else EMPTY
    median, low, high = (side["time_us"][name] / 1e3 for name in ("median", "p10", "p90"))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def ratio(row):
    return f"{row['fla_over_deltalink']:.2f}" if "fla_over_deltalink" in row else EMPTY


def memory(rows, side):
    found = [row[side]["peak_device_bytes"] for row in rows.values() if "peak_device_bytes" in row[side]]
    return f"{max(found) / 2**20:.0f}" if found else EMPTY
