"""Announcements in French, Spanish, Portuguese and Italian."""

from dflash_jax.engine.state_machine.languages.language import language

# Words that follow a verb in the present, but not a noun that looks like one.
_OBJECTS = (
    "il|lo|la|le|gli|i|subito|ora|adesso|prima|un|una|se|cosa|el|los|las|o|os|a|as|ahora|agora"
    "|primero|primeiro|qué|whether"
)

# Verbs whose past in the first person looks like a future: "comparé", "alterei".
_PAST = (
    "(?:compar|gener|ger|alter|prepar|separ|repar|explor|oper|recuper|configur|encontr|mostr|entr"
    "|consider|mejor|melhor|tir|retir|compr|filtr|registr|ignor|restaur|integr|import"
    "|procur)(?:é|ei)\\b"
)


def _clause_of(acts: str) -> str:
    """Return a pattern of a clause that begins with a verb in the first person of the present."""
    return rf"|(?:^|(?<=[,;:] ))(?=(?:{acts})\w*o (?:{_OBJECTS})\b)"


_FRENCH_ACTS = (
    r"vérifi|\blis\b|\blire|relire|relis|regard|lanc|exécut|ouvr|cherch|recherch|consult|examin"
    r"|test|analys|corrig|modifi|\bcrée|créer|écri|supprim|install|list|calcul|compar|récupér"
    r"|télécharg|inspect|explor|démarr|appel|jet\w+ un|voir|essa[iy]|contrôl|ajout|remplac"
    r"|renomm|déplac|copi|compil|mett\w+ à jour|parcour|interrog|charg|édit|trouv|commen[cç]"
    r"|continu|fais|faire|utilis|effectu|pass\w* (?:à|aux?)|fouill|répar|compt(?:er|e les)"
)
FRENCH = language(
    opens=(
        r"je (?:vais|dois|veux|voudrais|compte|m'apprête à)|laisse[zr]?[- ]moi"
        r"|il (?:me )?faut que"
        r" je|il me reste à|nous allons|on va|allons|voyons|commençons par|permet\w*[- ]moi de"
        rf"|je(?= (?:{_FRENCH_ACTS}))|j'(?={_FRENCH_ACTS})"
    ),
    acts=_FRENCH_ACTS,
    idle=(
        r"\b(?:pas|jamais|attend|reste|pense|crois|suppose|peux|pourrai|espère|sais|suis"
        r"|recommand"
        r"|conseill|ai\b|avais|comprends|laisser? (?:le|la|les|ça|tel)|explique|réponds|dire"
        r"|tiens"
        r"|m'excuse|regrette|propose|souhaite|vous (?:aider|laisse)|t'aider|en rester|toujours)"
    ),
    asks=r"\?|\b(?:si|dès que vous|dès que tu|quand vous|lorsque vous|une fois que|voulez|veux-tu"
    r"|souhaitez|à l'avenir|plus tard|vous pouvez|tu peux|faites-moi|dites-moi|dis-moi)\b|s'il",
)


_SPANISH_ACTS = (
    r"revis|\ble[eoíy]|mir|abr|ejecut|busc|comprob|comprueb|verific|examin|consult|prob|prueb"
    r"|analiz|arregl|correg|corrij|corrig|modific|cambi|cre[ao]|escrib|borr|elimin|instal"
    r"|list|calcul|compar"
    r"|obten|descarg|inspeccion|explor|inici|arranc|llam|echar un|ver\b|añad|agreg|reemplaz"
    r"|renombr|mov|muev|copi|compil|actualiz|recorr|carg|edit|encontr|encuentr|empez|comenz"
    r"|comienz|empiez|segui|hac(?:er|iendo)|hago|us[aoe]|lanz|cont(?:ar|emos)|repas|reinici"
    r"|intent|extra|localiz|gener|valid|depur"
)
SPANISH = language(
    opens=(
        r"(?:voy|vamos|procedo|paso) a|déja?me|dejame|permíta?me|permíteme|necesito|debo"
        r"|tengo que"
        rf"|quiero|empiezo por|comenzaré por"
        rf"|(?:ahora|primero|luego|después),?(?= (?:{_SPANISH_ACTS})\w*o\b)"
        rf"|(?=\w+(?:aré|eré|iré|remos)\b)(?!{_PAST})|estoy(?= \w+ndo\b)|(?:déjame|deja) que"
        rf"{_clause_of(_SPANISH_ACTS)}"
    ),
    acts=_SPANISH_ACTS,
    idle=(
        r"\b(?:no|nunca|siempre|esper|dej(?:o|aré) (?:lo|la|el|así|como)|creo|pienso|supon|puedo"
        r"|podría|sé|soy|estaré|recomiend|sugier|explic|respond|decir|lament|ayudar(?:te|le|los)?"
        r"|más información|saber|confirmación|aclar|quedo|queda)\b"
    ),
    asks=r"[?¿]|\b(?:si|cuando (?:me|quieras|lo|tú|usted)|en cuanto (?:me|lo)|una vez que|quieres"
    r"|quiere que|deseas|en el futuro|más tarde|puedes|puede usted|avísame|dime|dígame|hazme)\b",
)


_PORTUGUESE_ACTS = (
    r"verific|\bl(?:er|eio|endo|erei)\b|olh|abr|execut|busc|procur|confer|examin|consult|test"
    r"|analis|arrum|corrig|corrij|modific|mud|alter|cri[ao]|escrev|apag|exclu|remov|instal|list"
    r"|calcul|compar|obt|baix|inspecion|explor|inici|cham|dar uma|ver\b|adicion|acrescent"
    r"|substitu|renome|mov|copi|compil|atualiz|percorr|carreg|edit|encontr|começ|continu|faz"
    r"|us[ao]|rod(?:ar|o|ando)|lanç|reinici|tent|extra|localiz|ger|valid|depur|checar|checo"
    r"|pesquis"
)
PORTUGUESE = language(
    opens=(
        r"(?:vou|vamos|irei)|deix[ae](?:-me| eu| que eu)|me deixe|permit[ae]-me|preciso(?: de)?"
        rf"|devo|tenho (?:de|que)|quero"
        rf"|(?:agora|primeiro|depois),?(?= (?:{_PORTUGUESE_ACTS})\w*o\b)"
        rf"|(?=\w+(?:arei|erei|irei|remos)\b)(?!{_PAST})|estou(?= (?:a \w+r|\w+ndo)\b)"
        rf"{_clause_of(_PORTUGUESE_ACTS)}"
    ),
    acts=_PORTUGUESE_ACTS,
    idle=(
        r"\b(?:não|nunca|sempre|esper|aguard|deix(?:o|arei|ar) (?:como|assim)|acho|penso"
        r"|supon|posso"
        r"|poderia|sei|sou|estarei|ficar|recomend|sugir|explic|respond|dizer|lament|ajud(?:ar|á)"
        r"|mais informaç|saber|confirmaç|esclarec|fico)"
    ),
    asks=r"\?|\b(?:se|quando (?:você|me|quiser)|assim que|quiser|deseja|no futuro|mais tarde"
    r"|você pode|pode(?:s)? me|me avise|diga-me|me diga|gostaria)\b",
)


_ITALIAN_ACTS = (
    r"controll|legg|guard|apr|esegu|cerc|verific|esamin|consult|prov|test|analizz|sistem|corregg"
    r"|modific|cambi|crea|creo|scriv|cancell|elimin|install|elenc|calcol|confront|recuper|scaric"
    r"|ispezion|esplor|avvi|chiam|un'occhiata|ved(?:ere|iamo|o se)|vedrò|aggiung|sostitui"
    r"|rinomin|spost|copi|compil|aggiorn|scorr|caric|trov|inizi|cominc|continu|fa(?:re|rò|ccio)"
    r"|us[aoe]|lanc|riavvi|tent|estra|individu|gener|valid|cont(?:o|are|erò) |interrog"
)
ITALIAN = language(
    opens=(
        r"(?:vado|andiamo|procedo|passo|inizio|comincio) a|sto per|lasci(?:ami|atemi)"
        r"|mi (?:lasci|permetta)|fa(?:mmi|temi)"
        rf"|devo|dobbiamo|voglio|vorrei"
        rf"|(?:ora|adesso|prima|poi|quindi),?(?= (?:{_ITALIAN_ACTS})\w*o\b)"
        r"|(?=\w+(?:er|ir|ar)ò\b)|sto(?= \w+ndo\b)|permettimi di|vediamo|diamo|do un'occhiata"
        rf"{_clause_of(_ITALIAN_ACTS)}"
    ),
    acts=_ITALIAN_ACTS,
    idle=(
        r"\b(?:non|mai|sempre|ho|abbiamo|hai|ha|è|aspett|attend|lasci(?:o|erò) (?:tutto|così"
        r"|com)|credo|penso|suppon"
        r"|posso|potrei|so\b|sono|sarò|rest|consigli|sugger|spieg|rispond|dire|ammett|scus"
        r"|aiutar|più informazioni|sapere|conferma)"
    ),
    asks=r"\?|\b(?:se|quando (?:vuoi|mi|vuole)|non appena|appena mi|vuoi|vuole|desideri|in futuro"
    r"|più tardi|puoi|può|fammi sapere|dimmi|mi dica)\b",
)
