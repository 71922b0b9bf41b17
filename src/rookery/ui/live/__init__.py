"""The page of runs: served live over a folder (`rookery ui`), or exported as one file per run.

server     routes, access control, content security policy
address    address of the served page, for runs to print
folder     runs as rows, read again only if a file changed; curves, thinned without
           losing extremes
reading    one run: its events, curves and loop view
digests    the events of each loop, reduced to the data that its view draws
export     one run as a file that opens offline (`report.html`); the page of a service
fleets     current state of servers and of a service
static/    the page: plain modules, one file per view
"""

__all__: list[str] = []
