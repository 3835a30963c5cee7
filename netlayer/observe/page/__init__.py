"""The page of a run: heat map, timeline, 3D-parallel view, counters and the job's life, served or as one file.

`Columns` are what files hold, `run_of` their tables, `RunView` the judged state, `PageSource` answers the page's
requests for data, and `PageServer` serves them. The front end is in `web/`, built by npm. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.observe.page.columns import Columns as Columns
    from netlayer.observe.page.export import export_page as export_page
    from netlayer.observe.page.server import Actions as Actions
    from netlayer.observe.page.server import PageServer as PageServer
    from netlayer.observe.page.source import PageSource as PageSource
    from netlayer.observe.page.tables import run_of as run_of
    from netlayer.observe.page.view import RunView as RunView

__all__ = ["Actions", "Columns", "PageServer", "PageSource", "RunView", "export_page", "run_of"]

__getattr__ = lazy_names(
    __name__,
    {
        "Actions": ".server",
        "Columns": ".columns",
        "PageServer": ".server",
        "PageSource": ".source",
        "RunView": ".view",
        "export_page": ".export",
        "run_of": ".tables",
    },
)
