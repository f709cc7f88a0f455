# Pharos: prefetch -> evaluate -> fine-tune -> gate, each step a file under results/.
#
#   snakemake -n                          what would run
#   snakemake --cores all                 run it on this machine
#   snakemake --profile profiles/slurm    run it on a cluster
#
# The configuration is config/config.yaml, or the file that --configfile names instead of it.

from pharos.config import check_config_file
from pharos.errors import explained
from snakemake.utils import min_version

min_version("9.27.1")

# Snakemake merges --configfile into a default one; here it replaces it.
if not workflow.configfiles:
    with explained():
        check_config_file("config/config.yaml")

    configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/corpus.smk"
include: "workflow/rules/gate.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/finetune.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/verify.smk"


rule all:
    """Everything the configuration asks for, ending in the report."""
    default_target: True
    input:
        PAGES,
        deleted_files,
    localrule: True
