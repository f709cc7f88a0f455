rule report:
    """Make one self-contained page, and the leaderboard, from the artifacts alone."""
    input:
        **ARTIFACTS,
    output:
        page=report(
            "results/report/index.html",
            category="Report",
            caption="../report/page.rst",
        ),
        leaderboard=report(
            "results/report/leaderboard.csv",
            category="Report",
            caption="../report/leaderboard.rst",
        ),
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        title=CONFIG["report"]["title"],
    script:
        "../scripts/report.py"


onsuccess:
    import sys
    from pharos.report.closing import closing_lines

    for line in closing_lines(ARTIFACTS["promotions"], "results/report/index.html"):
        print(line, file=sys.stderr)
