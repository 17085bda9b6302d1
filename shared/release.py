"""The release of DigenRL, which its distribution, its services and its runs carry."""

RELEASE = "0.2.0"
