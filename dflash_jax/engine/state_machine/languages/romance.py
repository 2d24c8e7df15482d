"""Announcements in French, Spanish, Portuguese and Italian."""

from dflash_jax.engine.state_machine.languages import language

# Pronouns between a subject and its verb: "je les ouvre", "lo lanzo".
_FRENCH_OBJECTS = r"(?:(?:m'|l'|t'|y |en |le |la |les |vous |te |leur |lui )*)"
_OBJECT_PRONOUNS = r"(?:(?:ti|lo|la|los|las|le|les|li|gli|ne|ci|vi|me|te|se|o|os|as|mi) )*"

# Words that follow a verb in the present, but not a noun that looks like one.
_OBJECTS = (
    "il|lo|la|le|gli|i|l|subito|ora|adesso|prima|un|una|se|cosa|el|los|las|o|os|a|as|ahora|agora"
    "|primero|primeiro|qué|whether|un|uno|uma|um|unos|unas|este|esta|estos|estas|ese|esa|esto|eso"
    "|esse|essa|isso|isto|todo|toda|todos|todas|tutto|tutti|tutte|tudo|questo|questa|quel|quella"
    "|enseguida|inmediatamente|también|já|também|logo|anche|ambos|ambas|ambedue|entrambi|entrambe"
    "|dos|due|duas|dois|con|com|otro|otra|outro|outra|altro|altra|tu|tus|seu|sua|tuo|tua|su|sus"
    "|mi|meu"
)

# Verbs whose past in the first person looks like a future: "comparé", "alterei".
_PAST = (
    "(?:compar|gener|ger|alter|prepar|separ|repar|explor|oper|recuper|configur|encontr|mostr|entr"
    "|consider|mejor|melhor|tir|retir|compr|filtr|registr|ignor|restaur|integr|import"
    "|procur)(?:é|ei)\\b"
)


def _verb_of(acts: str, participles: str) -> str:
    """Return a pattern of a verb in the first person of the present, with pronouns before it."""
    verb = rf"(?:r[ei])?(?:{acts})\w*(?<=o)(?<!{participles})(?<!mento)\b"
    return _OBJECT_PRONOUNS + verb


def _clause_of(verb: str) -> str:
    """Return a pattern of a clause with such a verb and an object, which may be a pronoun.

    After an article or a preposition it is a noun: "un controllo del file".
    """
    alone = r"(?:^|(?<=[,;:] )|(?<=\b[ey] )|(?<!\b\w )(?<!\b\w\w )(?<!\b\w\w\w ))"
    pronoun = r"(?=(?:lo|la|los|las|li|te|ti|ci|me ne) )"
    return rf"|{alone}(?={verb} (?:(?:{_OBJECTS})\b|`))|{pronoun}(?={verb})"


_FRENCH_ACTS = (
    r"vérifi|\blis\b|\blire|relire|relis|regard|lanc|exécut|ouvr|cherch|recherch|consult|examin"
    r"|test|analys|corrig|modifi|\bcrée|créer|écri|supprim|install|list|calcul|compar|récupér"
    r"|télécharg|inspect|explor|démarr|appel|jet\w+ un|voir|essa[iy]|contrôl|ajout|remplac"
    r"|renomm|déplac|copi|compil|mett\w+ à jour|parcour|interrog|charg|édit|trouv|commen[cç]"
    r"|continu|fais|faire|utilis|effectu|pass\w* (?:à|aux?)|occupe|charge|fouill|répar|compt(?:er"
    r"|e les)"
    r"|mets?\b|mett|relanc|redémarr|réécri|rouvr|rejou|reconstrui|construi|génér|enregistr"
    r"|nettoy|désinstall|déploy|pouss|fusionn|clon|configur|connect|envo[iy]|sauvegard|restaur"
    r"|migr|extrai|applique|appliqu|convert|débogu|diagnosti|isol|invers|pren(?:ds|dre) |prépar"
    r"|procèd|procéd|reprodui|réinitialis|résou|retir|tri(?:e|er)\b|transf|va(?:is)? chercher"
    r"|vid(?:e|er)\b|attaqu|jett|suis? la piste|réessa[iy]|retent|tent(?:e|er)\b|identifi|mesur"
    r"|repér|rassembl|remont|rempl|surveill|termin|trait(?:e|er)|valid|évalu|entam|remet"
)
FRENCH = language(
    future=(
        r"je (?:vais|dois|m'apprête à|m'en vais)|laisse[zr]?[- ]moi"
        r"|il (?:me )?faut que"
        r" je|il me reste à|nous allons|on va|allons|voyons|commençons par|permet\w*[- ]moi de"
        r"|(?:prochaine étape|étape suivante|première étape|d'abord) ?:"
    ),
    opens=(
        r"je (?:veux|voudrais|compte)"
        r"|je m'(?:en|y) (?=occupe|charge|met)"
        rf"|(?:^|(?<=[,;:] ))(?=(?:re)?(?:{_FRENCH_ACTS})\w*(?<![ts]i)ons\b)|passons|mettons"
        rf"|je(?= {_FRENCH_OBJECTS}(?:re)?(?:{_FRENCH_ACTS}))|j'(?=(?:y |en )?(?:{_FRENCH_ACTS}))"
    ),
    acts=_FRENCH_ACTS,
    idle=(
        r"\b(?:pas\b|jamais|attend|(?<!le )(?<!du )(?<!au )rest(?:e|er|erai)\b|pense|crois\b"
        r"|suppose"
        r"|peux|pourrai|espère|sais\b|suis\b(?! la)|garde\w* (?:cela|ça|en)|noter?\b|souvien"
        r"|bien\W*$"
        r"|recommand"
        r"|conseill|ai\b|avais|comprends|laisser? (?:le|la|les|ça|tel)|explique|réponds|dire\b"
        r"|tiens|veille"
        r"|m'excuse|regrette|propose|souhaite|vous (?:aider|laisse)|t'aider|en rester|toujours)"
    ),
    asks=r"\?|\b(?:si|dès que vous|dès que tu|quand vous|lorsque vous|une fois que|voulez|veux-tu"
    r"|souhaitez|à l'avenir|plus tard|vous pouvez|tu peux|faites-moi|dites-moi|dis-moi)\b|s'il",
)


_SPANISH_NOW = (
    r"(?:ahora(?: mismo)?|primero|luego|después|enseguida|en seguida|a continuación|así que|por eso"
    r"|entonces|de inmediato|inmediatamente|antes de nada|para empezar|ya mismo),?"
)
_SPANISH_ACTS = (
    r"revis|\ble[eoíy]|mir|abr|ejecut|busc|comprob|comprueb|verific|examin|consult|prob|prueb"
    r"|analiz|arregl|correg|corrij|corrig|modific|cambi|cre[ao]|escrib|borr|elimin|instal"
    r"|list|calcul|compar"
    r"|obten|descarg|inspeccion|explor|inici|arranc|llam|echar un|ver\b|añad|agreg|reemplaz"
    r"|renombr|mov|muev|copi|compil|actualiz|recorr|carg|edit|encontr|encuentr|empez|comenz"
    r"|comienz|empiez|segui|hac(?:er|iendo)|hago|us[aoe]|lanz|cont(?:ar|emos)|repas|reinici"
    r"|intent|extra|localiz|gener|valid|depur|renuev|renov|repet|repit|reinstal|reconstru|relanz"
    r"|limpi|despleg|desplieg|sub(?:o|ir|iré)\b|baj|fusion|clon|configur|conect|enví|envi|guard"
    r"|restaur|migr|aplic|conviert|convert|aísl|aisl|prepar|procedo|reproduc|resuelv|resolv|retir"
    r"|orden|transf|vací|vaci|identific|mid[oe]|med(?:ir|iré)\b|recog|recoj|recopil|rastre|filtr"
    r"|procesa|proceso\b|evalú|evalu|escane|insert|quit|pong|pon(?:er|dr)|haré|doy|dar (?:un|de)"
    r"|entr(?:o|ar|aré)|sac(?:o|ar|aré)\b|tom(?:o|ar|aré)\b|ech(?:o|ar|aré)\b|met(?:o|er|eré)\b"
    r"|investig|rev[ei]rt|reescrib|solicit|pid[oe]|pedir|me (?:encarg|ocup|pong)|tra(?:e|ig)"
    r"|seguir|sig[oau]|conten|reun"
)
_SPANISH_VERB = _verb_of(_SPANISH_ACTS, "[^ñ]ado|[^ñ]ido")
SPANISH = language(
    future=(
        r"(?:voy|vamos|procedo|paso|procederé|pasaré) a|déja?me|dejame|permíta?me|permíteme"
        r"|empiezo por|comenzaré por|empecemos por|estoy a punto de"
        r"|(?:siguiente|próximo|primer) paso(?: es|:)"
    ),
    opens=(
        r"necesito\b|debo\b|tengo que|quiero\b|procedo\b"
        rf"|{_SPANISH_NOW}(?= {_SPANISH_VERB})"
        rf"|(?={_SPANISH_VERB}.* (?:ahora(?: mismo)?|enseguida|ya)\W*$)"
        rf"|(?=\w+(?:aré|eré|iré|remos)\b)(?!{_PAST})|estoy(?= \w+ndo\b)|(?:déjame|deja) que"
        rf"|(?:^|(?<=[,;:] ))(?=(?:{_SPANISH_ACTS})\w*emos\b)|veamos|me (?:encargo|ocupo|pongo)"
        rf"{_clause_of(_SPANISH_VERB)}"
    ),
    acts=_SPANISH_ACTS,
    idle=(
        r"\b(?:no|nunca|jamás|siempre|espero|esperar\w*|estar|recordar\w*|tener(?:lo)? en cuenta"
        r"|bien"
        r"|dej(?:o|aré) (?:lo|la|el|así|como)|creo|pienso|supon|puedo"
        r"|podría|sé|soy|estaré|recomiend|sugier|explic|respond|decir|lament|ayudar(?:te|le|los)?"
        r"|más información|saber|confirmación|aclar|quedo|queda)\b"
    ),
    asks=r"[?¿]|\b(?:si|cuando (?:me|quieras|lo|tú|usted)|en cuanto (?:me|lo)|una vez que|quieres"
    r"|quiere que|deseas|en el futuro|más tarde|puedes|puede usted|avísame|dime|dígame|hazme)\b",
)


_PORTUGUESE_NOW = (
    r"(?:agora(?: mesmo)?|primeiro|depois|em seguida|a seguir|então|já|logo|por isso|para começar"
    r"|antes de (?:tudo|mais nada)|imediatamente),?"
)
_PORTUGUESE_ACTS = (
    r"verific|\bl(?:er|eio|endo|erei)\b|olh|abr|execut|busc|procur|confer|examin|consult|test"
    r"|analis|arrum|corrig|corrij|modific|mud|alter|cri[ao]|escrev|apag|exclu|remov|instal|list"
    r"|calcul|compar|obt|baix|inspecion|explor|inici|cham|dar uma|ver\b|adicion|acrescent"
    r"|substitu|renome|mov|copi|compil|atualiz|percorr|carreg|edit|encontr|começ|continu|faz"
    r"|us[ao]|rod(?:ar|o|ando)|lanç|reinici|tent|extra|localiz|ger|valid|depur|checar|checo"
    r"|pesquis|renov|repet|repit|reinstal|reconstru|relanç|limp|implant|sub(?:o|ir|irei)\b|mescl"
    r"|clon|configur|conect|envi|salv|restaur|migr|aplic|convert|isol|prepar|proced|reproduz"
    r"|resolv|retir|orden|transf|esvazi|identific|med(?:ir|irei)\b|colet|reun|rastre|filtr|process"
    r"|avali|escane|inser|tir(?:o|ar|arei)\b|coloc|pôr\b|ponho|entr(?:o|ar|arei)\b|peg(?:o|ar"
    r"|arei)\b"
    r"|investig|revert|revis|reescrev|solicit|peç|pedir|traz|trag|junt|levant|monitor|dar um|faç"
    r"|me encarreg|cuid(?:o|ar|arei) d|veja|espi[ao]|fuç"
)
_PORTUGUESE_VERB = _verb_of(_PORTUGUESE_ACTS, "[^ñ]ado|[^ñ]ido")
PORTUGUESE = language(
    future=(
        r"(?:vou|vamos|irei)|deix[ae](?:-me| eu| que eu)|me deixe|permit[ae]-me"
        r"|(?:próximo|primeiro) passo(?: é|:)"
    ),
    opens=(
        r"preciso\b(?: de)?|devo\b|tenho (?:de|que)|quero\b"
        rf"|{_PORTUGUESE_NOW}(?= {_PORTUGUESE_VERB})"
        rf"|(?={_PORTUGUESE_VERB}.* (?:agora(?: mesmo)?|já)\W*$)"
        rf"|(?=\w+(?:arei|erei|irei|remos)\b)(?!{_PAST})|estou(?= (?:a \w+r|\w+ndo)\b)"
        rf"{_clause_of(_PORTUGUESE_VERB)}"
    ),
    acts=_PORTUGUESE_ACTS,
    idle=(
        r"\b(?:não|nunca|jamais|sempre|esper|estar\b|lembrar|levar em conta|bem\W*$|torcer|aguard"
        r"|deix(?:o|arei|ar) (?:como|assim)|acho|penso"
        r"|supon|posso"
        r"|poderia|sei\b|sou\b|estarei|ficar|recomend|sugir|explic|respond|dizer|lament|ajud(?:ar"
        r"|á)"
        r"|mais informaç|saber|confirmaç|esclarec|fico)"
    ),
    asks=r"\?|\b(?:se|quando (?:você|me|quiser)|assim que|quiser|deseja|no futuro|mais tarde"
    r"|você pode|pode(?:s)? me|me avise|diga-me|me diga|gostaria)\b",
)


_ITALIAN_NOW = (
    r"(?:ora|adesso|prima|poi|quindi|subito|per prima cosa|come prima cosa|innanzitutto|allora"
    r"|per cominciare|a questo punto|intanto|così),?"
)
_ITALIAN_ACTS = (
    r"controll|legg|guard|apr|esegu|cerc|verific|esamin|consult|prov|test|analizz|sistem|corregg"
    r"|modific|cambi|crea|creo|scriv|cancell|elimin|install|elenc|calcol|confront|recuper|scaric"
    r"|ispezion|esplor|avvi|chiam|un'occhiata|ved(?:ere|iamo|o se)|vedrò|aggiung|sostitui"
    r"|rinomin|spost|copi|compil|aggiorn|scorr|caric|trov|inizi|cominc|continu|fa(?:re|rò|ccio)"
    r"|us[aoe]|lanc|riavvi|tent|estra|individu|gener|valid|cont(?:o|are|erò) |interrog|rilanc"
    r"|rinnov|ripet|reinstall|ricostru|costru|pul(?:isc|ir)|rilasc|distribu|fond|clon|configur|conn"
    r"|colleg|invi|mand|salv|ripristin|migr|applic|convert|isol|prepar|riproduc|risolv|rimuov|togl"
    r"|ordin|trasfer|svuot|identific|misur|raccolg|raccogl|filtr|elabor|valut|scansion|inser|mett"
    r"|prend|tir(?:o|are|erò)\b|indag|annull|riscriv|richied|chied|port(?:o|are|erò)|monitor|tracc"
    r"|me ne occupo|ci penso|complet|apport|sistem|d(?:o|are|arò) (?:\w+ )?un'occhiata|riprov"
    r"|ricaric|riapr|rilegg|rifacc"
)
_ITALIAN_VERB = _verb_of(_ITALIAN_ACTS, "ato|ito|uto")
ITALIAN = language(
    future=(
        r"(?:vado|andiamo|procedo|passo|inizio|comincio) a|sto per|lasci(?:ami|atemi)"
        r"|mi (?:lasci|permetta)|fa(?:mmi|temi)|permettimi di"
        r"|(?:prossimo|primo) passo(?: è|:)|passo successivo(?: è|:)"
    ),
    opens=(
        r"devo\b|dobbiamo|voglio|vorrei|vediamo|diamo|do (?:\w+ )?un'occhiata|(?=(?:pro)?cedo\b)"
        r"|(?:proviamo|controlliamo|verifichiamo|guardiamo|iniziamo|cominciamo|passiamo|apriamo"
        r"|cerchiamo|lanciamo|eseguiamo)|me ne occupo|ci penso (?:io|subito)"
        rf"|{_ITALIAN_NOW}(?= {_ITALIAN_VERB})"
        rf"|(?={_ITALIAN_VERB}.* (?:ora|adesso|subito)\W*$)"
        r"|(?=\w+(?:er|ir|ar)ò\b)|sto(?= \w+ndo\b)"
        rf"{_clause_of(_ITALIAN_VERB)}"
    ),
    acts=_ITALIAN_ACTS,
    idle=(
        r"\b(?:non\b|mai\b|sempre|ho\b|abbiamo|hai\b|ha\b|è\b|aspett|attend|ricord|terrò|bene\W*$"
        r"|lasci(?:o|erò) (?:tutto|così"
        r"|com)|credo|penso|suppon"
        r"|posso|potrei|so\b|sono|sarò|rest|consigli|sugger|spieg|rispond|dire\b|ammett|scus"
        r"|aiutar|più informazioni|sapere|conferma)"
    ),
    asks=r"\?|\b(?:se|quando (?:vuoi|mi|vuole)|non appena|appena mi|vuoi|vuole|desideri|in futuro"
    r"|più tardi|puoi|può|fammi sapere|dimmi|mi dica)\b",
)
