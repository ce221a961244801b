"""Reports of published models, and what a change of a job that has ended needs"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("report", sa.Text(), nullable=False, server_default=""))
    op.add_column("rounds", sa.Column("ridge", sa.String(length=32), nullable=False, server_default=""))
    op.add_column("tasks", sa.Column("spec_json", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_column("spec_json")
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.drop_column("ridge")
        batch_op.drop_column("report")
