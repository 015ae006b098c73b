"""The records of a session as one page."""


def in_words(record):
    """The few figures of a phase that fit into a cell."""
    found, phase = record.get("figures") or {}, record["phase"]
    if record["outcome"] == "not possible" or not found:
        return record.get("reason") or ""
    words = [record["reason"]] if record.get("reason") else []
    if "cases" in found:
        words.append(f"{found['cases']} cases, {found.get('failed', found.get('failures'))} failed")
    if "tests" in found:
        words += [f"{name}: {text}" for name, text in found["tests"].items()]
    if "rel_rms" in found:
        words.append(", ".join(f"{name} {x:.1e}" for name, x in found["rel_rms"].items()) + f"; o and ht within {found['limit']:.0e}")
    if "summaries" in found:
        words += found["summaries"]
    if "comparisons" in found:
        words.append(f"{found['comparisons']} comparisons, {len(found['failed'])} failed")
    for one in found.get("inputs", []):
        soak = one["repetitions"]
        alike = f", {soak['repetitions']} repetitions, {soak['different']} differ" if soak else ""
        words.append(f"{one['pes']} PEs, waits in {one['waits']}, o {one['rel_rms_vs_f64']['o']:.1e}{alike}")
    if "heads_sent" in found:
        arrival = found["soonest_arrival_us"]
        words.append(f"{found['heads_sent_while_scanning']} of {found['heads_sent']} heads left while others were scanned")
        words.append("no message" if arrival is None else f"soonest arrival {arrival:.1f} us after leaving")
    if "points" in found:
        words.append(f"{len(found['points'])} points, below" if phase.startswith("comm") or "settings" in found else "")
    if "rows" in found:
        words.append(f"{len(found['rows'])} rows, below")
    return "; ".join(word for word in words if word)


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    cells = lambda row: " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row)
    return lines + [f"| {cells(row)} |" for row in rows]


def markdown(records):
    if not records:
        return "# Records\n\nNo phase was run.\n"
    last = records[-1]
    gpus = last["machine"]["gpus"]
    where = " + ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or last["machine"]["cpu"]
    versions = ", ".join(f"{name} {found}" for name, found in last["versions"].items())
    lines = [
        "# Records", "",
        f"{where}, driver {last['driver']}, device {last['device']}; {versions}; commit {last['commit']}; "
        f"{records[0]['date']} to {last['date']}.", "",
    ]
    if last["device"] == "cpu":
        lines += ["Toy sizes on the CPU back end: this tries the phases out, and says nothing about speed.", ""]
    lines += table(["phase", "outcome", "s", "found"],
                   ([record["phase"], record["outcome"], f"{record['wall_s']:.1f}", in_words(record)] for record in records))
    with_points = [record for record in records if "settings" in (record["figures"] or {})]
    if with_points:
        lines += ["", "## Steps", ""]
        lines += table(["phase", "tokens", "gates", "mode", "pass", "median us (p10 to p90)", "wait us", "TFLOP/s", "Hopper",
                        "kernels us"], (row for record in with_points for row in steps(record)))
    messages = [record for record in records if "path" in (record["figures"] or {})]
    if messages:
        lines += ["", "## Messages", ""]
        lines += table(["phase", "path", "bytes", "blocks", "median us", "GB/s"],
                       ([record["phase"], record["figures"]["path"], point["bytes"], point["blocks"],
                         f"{point['median_us']:.2f}", f"{point['gb_s']:.2f}"]
                        for record in messages for point in record["figures"]["points"]))
    beside = [record for record in records if "rows" in (record["figures"] or {})]
    if beside:
        lines += ["", "## Beside flash-linear-attention", ""]
        lines += table(["op", "PEs", "heads", "tokens", "gates", "pass", "deltalink us", "FLA us", "FLA / deltalink"],
                       (peer(row) for record in beside for row in record["figures"]["rows"]))
    return "\n".join(lines) + "\n"


def steps(record):
    for point in record["figures"]["points"]:
        time = f"{point['median_us']:.1f} ({point['p10_us']:.1f} to {point['p90_us']:.1f})"
        kernels = ", ".join(f"{name} {us:.1f}" for name, us in point["kernels_us"].items())
        yield [record["phase"], point["tokens"], point["gates"], point["mode"], point["pass"], time,
               f"{point['exposed_wait_us']:.1f}", f"{point['tflop_s']:.3g}", "yes" if point["hopper"] else "no", kernels]


def peer(row):
    number = lambda x, form: form.format(x) if x is not None else ""
    theirs = "refused" if row["refused"] else number(row["fla_us"], "{:.1f}")
    return [row["op"], row["pes"], row["heads"], row["tokens"], row["gates"], row["pass"], number(row["deltalink_us"], "{:.1f}"),
            theirs, number(row["fla_over_deltalink"], "{:.2f}")]
