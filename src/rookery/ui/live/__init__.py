"""The page of runs: live over a folder of them (`rookery ui`), and as one file of each.

server     the routes, who may ask, the policy of the page
address    where it is served, for runs to print
folder     all runs as rows, read again only where a file changed; their curves,
           thinned so that no extreme is lost
reading    one run: its events, its curves, what its loop shows of them
digests    what each loop's events say, in the shape that its view draws
export     one run as one file that opens offline: its `report.html`; the page of a service
fleets     servers and a service as they are now
static/    the page: plain modules, a file per view
"""

__all__: list[str] = []
