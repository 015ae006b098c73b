"""What of the reports that the program writes goes into a record. Each function takes a report and returns a dictionary; its
`passed`, where there is one, says whether the results were right."""

import math

import tensors

ACCURACY = 2e-3
"""Largest relative RMS difference of o and of final states in bf16 from the CPU back end, of the portable bodies and of those for
Hopper: both round the same operands as the CPU back end."""


def verify(report):
    worst = {}
    for group in report["groups"]:
        found = (group.get("worst") or {}).get("error") or {}
        for name, error in found.items():
            if isinstance(error, dict) and isinstance(error.get("rel_rms"), float):
                of_type = worst.setdefault(group["dtype"], {})
                of_type[name] = max(of_type.get(name, 0.0), error["rel_rms"])
    return {"passed": report["passed"], "cases": report["cases"], "bitwise": report["bitwise"],
            "failed": sum(group["failed"] for group in report["groups"]), "worst_rel_rms": worst,
            "failures": report["failures"][:10]}


def tiles(report, on_gpu):
    """`on_gpu`: a GPU must have been compared, not the CPU back end alone."""
    rows = report["rows"]
    return {"passed": report["passed"] and (report["gpu"] is not None or not on_gpu), "gpu": report["gpu"], "cases": sum(row["cases"] for row in rows),
            "failures": sum(row["failures"] for row in rows)}


def self_test(report, on_gpu):
    """`on_gpu`: messages must have gone between PEs on GPUs too."""
    tests = [finding for finding in report["findings"] if finding["item"].startswith("self-test")]
    complete = any("GPU" in finding["item"] or not on_gpu for finding in tests)
    return {"passed": complete and all(finding["status"] == "ok" for finding in tests),
            "tests": {finding["item"]: finding["found"] for finding in tests}}


def op(report):
    def point(found):
        time, kernels = found["time_us"], found["kernels"]
        return {
            **{name: found[name] for name in ("tokens", "gates", "mode", "pass", "hopper", "waits", "bytes_sent",
                                               "peak_device_bytes")},
            **{f"{name}_us": time[name] for name in ("median", "p10", "p90")},
            "exposed_wait_us": found["exposed_wait_us"]["median"],
            "tflop_s": found["tflop_s"]["median"],
            "tb_s": found["tb_s"]["median"],
            "kernels_us": {kernel["kernel"]: kernel["time_us"]["median"] for kernel in kernels},
        }

    settings = {name: report["settings"][name] for name in ("op", "heads", "key_dim", "value_dim", "dtype", "pes",
                                                             "world", "clock", "warmup", "repeats")}
    return {"settings": settings, "points": [point(found) for found in report["points"]]}


def comm(report):
    points = [{"bytes": found["bytes"], "blocks": found["blocks"], "median_us": found["time_us"]["median"],
               "gb_s": found["bandwidth_gb_s"]["median"], "oversubscribed": found["oversubscribed"]}
              for found in report["points"]]
    return {"path": report["settings"]["path"], "pes": report["settings"]["pes"], "points": points}


def run(reports):
    def one(report):
        errors = {name: error["rel_rms"] for name, error in report["error"].items()}
        kept = {name: report[name] for name in ("input", "op", "dtype", "pes", "world", "mode", "waits", "transport",
                                                "passed", "transition_weight", "exposed_wait_us")}
        return {**kept, "rel_rms_vs_f64": errors, "repetitions": report.get("repetitions")}

    inputs = [one(report) for report in reports]
    return {"passed": bool(inputs) and all(found["passed"] is True for found in inputs), "inputs": inputs}


def trace(said):
    heads = said["heads"]
    pes = [{"pe": pe["pe"], "busy_us": pe["busy_ns"] / 1e3, "exposed_wait_us": pe["exposed_wait_ns"] / 1e3,
            "put_us": pe["put_ns"] / 1e3, "exposed_put_us": pe["exposed_put_ns"] / 1e3, "bytes_put": pe["bytes_put"]}
           for pe in said["pes"]]
    soonest = heads["soonest_ns"]
    # A step in which a PE sent nothing shows nothing.
    return {"passed": heads["sent"] > 0 and soonest is not None, "span_us": said["span_ns"] / 1e3, "pes": pes,
            "heads_sent": heads["sent"], "heads_sent_while_scanning": heads["sent_while_scanning"],
            "soonest_arrival_us": None if soonest is None else soonest / 1e3}


def accuracy(found, expected, limit):
    """Outputs of the device in the file `found`, of the CPU back end in `expected`."""
    off = tensors.distances(tensors.load(found), tensors.load(expected))
    judged = {name: off.get(name, math.nan) for name in ("o", "ht")}
    # Not so for nan.
    return {"passed": all(x <= limit for x in judged.values()), "limit": limit, "rel_rms": off}


def convolution(text):
    lines = text.splitlines()
    verdicts = [line for line in lines if line.endswith((": pass", ": FAIL"))]
    failed = [line for line in verdicts if line.endswith("FAIL")]
    times = [line for line in lines if " us, " in line and "GB/s" in line]
    return {"passed": bool(verdicts) and not failed, "comparisons": len(verdicts), "failed": failed[:10], "times": times}


def sanitizer(text):
    """Summaries of compute-sanitizer: `ERROR SUMMARY: 0 errors`, and of racecheck `RACECHECK SUMMARY: 0 hazards ..`."""
    summaries = [line.strip("= \t") for line in text.splitlines() if "SUMMARY:" in line]
    clean = [line for line in summaries if ": 0 errors" in line or ": 0 hazards" in line]
    return {"passed": bool(summaries) and clean == summaries, "summaries": summaries}


def peers(report):
    def row(found):
        kept = {name: found.get(name) for name in ("op", "pes", "heads", "tokens", "gates", "pass", "fla_over_deltalink")}
        sides = {side: (found[side].get("time_us") or {}).get("median") for side in ("deltalink", "fla")}
        return {**kept, "deltalink_us": sides["deltalink"], "fla_us": sides["fla"], "refused": found["fla"].get("refused")}

    return {"versions": report["versions"], "rows": [row(found) for found in report["rows"]]}
