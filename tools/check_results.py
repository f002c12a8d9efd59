"""Add up pytest's reports: names what failed or was skipped, and closes with one line of totals.

Exit code 1 if anything failed, was skipped (in CI nothing may be: the real model is there), or a report is missing.
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main(paths: list[str]) -> int:
    counts: Counter[str] = Counter()
    is_whole = True
    for path in paths:
        cases = list(ET.parse(path).iter("testcase")) if Path(path).is_file() else []
        if not cases:
            print(f"{path}: no report, or no test in it")
            is_whole = False
        for case in cases:
            counts[outcome(case)] += 1
            if outcome(case) != "passed":
                print(f"{outcome(case)}: {case.get('classname')}::{case.get('name')}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if is_whole and counts["passed"] and not counts["failed"] and not counts["skipped"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
