"""Certificates that this process trusts: the machine's, and the setting's."""

import ssl

from shared.errors import UserError


def trusted_with(ca: str | None) -> ssl.SSLContext:
    """Return a context that verifies servers, also by the certificates in ``ca`` (PEM).

    Raises:
        UserError: if it holds none.
    """
    context = ssl.create_default_context()
    if ca is not None:
        try:
            context.load_verify_locations(cadata=ca)
        except (ssl.SSLError, ValueError) as error:
            raise UserError(
                "DIGENRL_CA: no certificate as PEM text; give the content of ca/cert.pem of "
                "`digenrl keys init --run RUN --tls HOST`, not its name"
            ) from error
    return context
