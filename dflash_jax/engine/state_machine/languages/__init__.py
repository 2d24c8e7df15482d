"""Words with which outputs announce the speaker's own next step, by language."""

import re

from dflash_jax.engine.state_machine.languages import germanic, others, romance
from dflash_jax.engine.state_machine.languages.germanic import ENGLISH
from dflash_jax.engine.state_machine.languages.language import Language

LANGUAGES: tuple[Language, ...] = (
    ENGLISH,
    germanic.GERMAN,
    germanic.DUTCH,
    germanic.NORDIC,
    romance.FRENCH,
    romance.SPANISH,
    romance.PORTUGUESE,
    romance.ITALIAN,
    others.POLISH,
    others.RUSSIAN,
    others.TURKISH,
    others.CHINESE,
    others.JAPANESE,
    others.KOREAN,
    others.ARABIC,
    others.HINDI,
    others.VIETNAMESE,
    others.INDONESIAN,
)

# A sentence that asks the reader to wait for what the sentence before it announced.
FILLER = re.compile(
    r"^(?:(?:just |please |give me )*\W*(?:one|a|another)? ?(?:moment|second|sec|minute|bit)\b.*"
    r"|(?:please )?(?:(?:hold|hang)\W+on|stand by|bear with me|wait)\b(?! for you).{0,30}"
    r"|back (?:in|shortly|soon)\b.*|(?:i'm )?on it|right away|thank you for your patience"
    r"|(?:this|it) (?:will|should|may|might|could|won't) (?:only |just )*take.*"
    r"|(?:einen? )?(?:kleinen )?(?:moment|augenblick|sekunde)\b.{0,20}"
    r"|un (?:petit )?(?:instant|moment|momento|attimo|segundo)\b.{0,20}"
    r"|um (?:momento|instante|segundo)\b.{0,20}"
    r"|een (?:moment|ogenblik)\b.{0,20}"
    r"|ett? (?:ögonblick|øyeblikk|øjeblik)\b.{0,20}"
    r"|(?:chwil[aęk]\w*|moment|momencik|sekund[aęk]\w*)\b.{0,20}"
    r"|(?:одну? )?(?:минут\w*|секунд\w*|момент)\b.{0,20}"
    r"|bir (?:saniye|dakika|an)\b.{0,20}"
    r"|[请請]?稍[等候].{0,6}|少々お待ちください.?|ちょっと待って.{0,8}"
    r"|잠시만.{0,10}|잠깐만.{0,6}|لحظة.{0,15}|एक (?:पल|मिनट|क्षण).{0,12}"
    r"|(?:chờ|đợi) (?:một|tí|chút).{0,12}|(?:sebentar|tunggu sebentar)\b.{0,12})\W*$"
)

__all__ = ["ENGLISH", "FILLER", "LANGUAGES", "Language"]
