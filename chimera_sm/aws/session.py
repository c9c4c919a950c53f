"""One session for all that talks to AWS, and AWS's refusals as errors that a person can act on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chimera_sm.errors import AwsRefused

_CREDENTIALS_FIX = "run `aws sso login` or `aws configure`, or set AWS_PROFILE"
_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId", "UnrecognizedClientException"}
)
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})
_QUOTA = re.compile(r"service limit '([^']+)'")


class Session:
    """Clients of one region and one set of credentials, made on first use."""

    def __init__(self, region: str):
        import boto3

        with aws_errors("find credentials"):
            self._session: Any = boto3.Session(region_name=region)
        self.region = region
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            config = Config(retries={"mode": "adaptive", "max_attempts": 8}, user_agent_extra="chimera_sm")
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    def has_credentials(self) -> bool:
        """May ask the machine's own metadata service."""
        with aws_errors("find credentials"):
            return self._session.get_credentials() is not None


@contextmanager
def aws_errors(doing: str) -> Iterator[None]:
    """Turn botocore's errors into AwsRefused: `cannot <doing>: …`, with AWS's own message."""
    from botocore import exceptions

    try:
        yield
    except exceptions.ClientError as error:
        raise _refusal(doing, dict(error.response.get("Error", {})), error.operation_name) from error
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise AwsRefused(f"cannot {doing}: no AWS credentials ({error})", fix=_CREDENTIALS_FIX) from error
    except (
        exceptions.CredentialRetrievalError,
        exceptions.ProfileNotFound,
        exceptions.SSOError,
        exceptions.TokenRetrievalError,
    ) as error:
        raise AwsRefused(f"cannot {doing}: AWS credentials cannot be had: {error}", fix=_CREDENTIALS_FIX) from error
    except exceptions.BotoCoreError as error:
        raise AwsRefused(f"cannot {doing}: {error}") from error


def error_code(error: Any) -> str:
    """AWS's code of a ClientError."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _refusal(doing: str, error: dict[str, Any], operation: str) -> AwsRefused:
    code, message = str(error.get("Code", "")), error.get("Message", "")
    fix = ""
    if code in _EXPIRED:
        fix = _CREDENTIALS_FIX
    elif code in _DENIED:
        fix = f"the caller needs permission for {operation}"
    elif code == "ResourceLimitExceeded":
        quota = _QUOTA.search(message)
        fix = f"request more of {quota.group(1) if quota else 'the quota'} in Service Quotas"
    return AwsRefused(f"cannot {doing}: {code}: {message}", fix=fix)
