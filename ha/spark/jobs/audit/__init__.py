"""`ha spark audit`: compares copies of a log and checks each of them."""

from ha.spark.jobs.audit.job import AuditOptions, AuditResult, audit
from ha.spark.jobs.audit.report import write_audit

__all__ = ["AuditOptions", "AuditResult", "audit", "write_audit"]
