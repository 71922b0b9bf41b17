"""`rookery ui`: a page over the folders of runs, live, read-only, from this machine alone.

server     the routes, who may ask, the policy of the page
folder     all runs as rows, read again only where a file changed
reading    one run: its events, its curves, what its loop shows of them
curves     metrics, thinned so that no extreme is lost
digests    what each loop's events say, in the shape that its view draws
export     one run as one file that opens offline
static/    the page: plain modules, a file per view
"""

__all__: list[str] = []
