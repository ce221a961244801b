"""Rounds with secure aggregation: attempt, phase, and what institutions answered"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("attempt", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("rounds", sa.Column("phase", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "masks",
        sa.Column("job_id", sa.String(length=80), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("phase", sa.Integer(), nullable=False),
        sa.Column("institution", sa.String(length=63), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("message", sa.LargeBinary(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["job_id", "round"], ["rounds.job_id", "rounds.number"]),
        sa.PrimaryKeyConstraint("job_id", "round", "phase", "institution"),
    )


def downgrade() -> None:
    op.drop_table("masks")
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.drop_column("phase")
        batch_op.drop_column("attempt")
