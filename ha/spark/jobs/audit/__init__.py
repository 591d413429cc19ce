"""Copies of a log compared, and each checked by itself."""

from ha.spark.jobs.audit.job import AuditOptions, AuditResult, audit
from ha.spark.jobs.audit.report import write_audit

__all__ = ["AuditOptions", "AuditResult", "audit", "write_audit"]
