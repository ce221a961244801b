"""First tables"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "agents",
        sa.Column("identity", sa.String(length=512), nullable=False),
        sa.Column("institution", sa.String(length=63), nullable=False),
        sa.Column("session", sa.String(length=64), nullable=False),
        sa.Column("software_version", sa.String(length=64), nullable=False),
        sa.Column("joined_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("activity", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("identity"),
        sa.UniqueConstraint("session"),
    )
    with op.batch_alter_table("agents", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_agents_institution"), ["institution"], unique=False)

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("strategy", sa.String(length=64), nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("rounds_published", sa.Integer(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_created_ms"), ["created_ms"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_state"), ["state"], unique=False)

    op.create_table(
        "events",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=80), nullable=False),
        sa.Column("time_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("institution", sa.String(length=63), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("evaluations", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_job", ["job_id", "number"], unique=False)

    op.create_table(
        "rounds",
        sa.Column("job_id", sa.String(length=80), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("model_sha256", sa.String(length=64), nullable=False),
        sa.Column("model_size", sa.BigInteger(), nullable=False),
        sa.Column("published_sha256", sa.String(length=64), nullable=False),
        sa.Column("opened_ms", sa.BigInteger(), nullable=False),
        sa.Column("deadline_ms", sa.BigInteger(), nullable=False),
        sa.Column("due_ms", sa.BigInteger(), nullable=False),
        sa.Column("quorum_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "number"),
    )
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.create_index("ix_rounds_due", ["state", "due_ms"], unique=False)

    op.create_table(
        "tasks",
        sa.Column("job_id", sa.String(length=80), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("institution", sa.String(length=63), nullable=False),
        sa.Column("trains", sa.Boolean(), nullable=False),
        sa.Column("counts", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=False),
        sa.Column("leased_to", sa.String(length=64), nullable=False),
        sa.Column("lease_ms", sa.BigInteger(), nullable=False),
        sa.Column("code", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("identity", sa.String(length=512), nullable=False),
        sa.Column("update_sha256", sa.String(length=64), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.Column("evaluations", sa.Text(), nullable=False),
        sa.Column("ledger_records", sa.BigInteger(), nullable=False),
        sa.Column("ledger_sha256", sa.String(length=64), nullable=False),
        sa.Column("finished_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "round"],
            ["rounds.job_id", "rounds.number"],
        ),
        sa.PrimaryKeyConstraint("job_id", "round", "institution"),
        sa.UniqueConstraint("token"),
    )
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.create_index("ix_tasks_institution", ["institution", "state"], unique=False)
        batch_op.create_index("ix_tasks_lease", ["state", "lease_ms"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_index("ix_tasks_lease")
        batch_op.drop_index("ix_tasks_institution")

    op.drop_table("tasks")
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.drop_index("ix_rounds_due")

    op.drop_table("rounds")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_job")

    op.drop_table("events")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_state"))
        batch_op.drop_index(batch_op.f("ix_jobs_created_ms"))

    op.drop_table("jobs")
    with op.batch_alter_table("agents", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_agents_institution"))

    op.drop_table("agents")
