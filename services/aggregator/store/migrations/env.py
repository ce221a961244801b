"""Run by Alembic, with the caller's connection."""

from alembic import context

from aggregator.store.schema import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
