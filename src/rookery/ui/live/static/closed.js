// Keeps the view that the link named: the form sends its key to that address.

document.forms[0].action = `/${location.hash}`;
