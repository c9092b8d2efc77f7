"""All templates, by name."""

from __future__ import annotations

from tests.support.templates.chatml import CHATML
from tests.support.templates.deepseek import DEEPSEEK
from tests.support.templates.gemma import GEMMA
from tests.support.templates.glm import GLM
from tests.support.templates.gpt_oss import GPT_OSS
from tests.support.templates.llama import LLAMA
from tests.support.templates.mistral import MISTRAL
from tests.support.templates.named_roles import NAMED_ROLES
from tests.support.templates.phi import PHI
from tests.support.templates.qwen import QWEN

TEMPLATES = {
    template.name: template
    for family in (QWEN, CHATML, DEEPSEEK, GLM, LLAMA, MISTRAL, GEMMA, PHI, NAMED_ROLES, GPT_OSS)
    for template in family
}
