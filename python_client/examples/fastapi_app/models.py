"""The tables of the shop."""

from __future__ import annotations

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker


class Base(DeclarativeBase):
    """What all tables share."""


class Order(Base):
    """An order, whose receipt goes out in the background."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    total: Mapped[int]
    has_receipt: Mapped[bool] = mapped_column(default=False)


def url() -> str:
    """Return where the database is, as SQLAlchemy wants to be told."""
    return os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://", 1)


Session = sessionmaker()
if "DATABASE_URL" in os.environ:  # a test binds it to a connection of its own
    Session.configure(bind=create_engine(url()))


def create_tables() -> None:
    """Create what is missing."""
    Base.metadata.create_all(create_engine(url()))
